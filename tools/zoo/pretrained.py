"""Pretrained sweep: ``load_pretrained`` and ``save_pretrained`` against transformers' own.

A model with random weights is saved by its own ``save_pretrained``. It is loaded into a wrapped model of other weights
and into one on the meta device, on one rank and as each of two. All parameters and buffers are compared with those of
``from_pretrained``, bit for bit, on one rank the unsaved ones too. The tensors that our ``save_pretrained`` writes are
compared with those of transformers' file. A type is exact, WRONG, refused (with the message), or not comparable, if
transformers does not load the file that it saved.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from nxdpp import NxDPPModel, load_pretrained, parallel_state, save_pretrained
from nxdpp.tracing.graph.errors import TracingError
from tools.zoo import ARGUMENTS, build
from tools.zoo.sweep import Verdict


def judge(task: str, model_type: str) -> Verdict:
    """Compare the checkpoints of one type."""
    parallel_state.initialize_model_parallel()
    with tempfile.TemporaryDirectory() as folder:
        return compare(task, model_type, Path(folder))


def compare(task: str, model_type: str, folder: Path) -> Verdict:
    """``judge`` with files in ``folder``."""
    saved: Any = build(task, model_type)
    randomise(saved, 1)
    try:
        saved.save_pretrained(folder / "theirs")
        expected: Any = type(saved).from_pretrained(folder / "theirs")
    except Exception as error:
        return Verdict("not comparable", f"{type(error).__name__}: {error}")
    real, empty = build(task, model_type), build(task, model_type, "meta")
    randomise(real, 2)
    given: dict[str, Any] = dict(ARGUMENTS.get(model_type, {}))
    try:
        wrapped = [NxDPPModel(model, **given) for model in (real, empty)]
    except (TracingError, ValueError) as error:
        return Verdict("refused", f"{type(error).__name__}: {error}")
    differing = []
    for device, model in zip(("real", "meta"), wrapped, strict=True):
        load_pretrained(model, folder / "theirs")
        differing += [f"{device}: {name}" for name in differences(model.local_state_dict(), expected.state_dict())]
        buffers = dict(model.local_named_buffers()), dict(expected.named_buffers())
        differing += [f"{device}: {name}" for name in differences(*buffers)]
    save_pretrained(wrapped[1], folder / "ours")
    ours, theirs = (load_file(folder / name / "model.safetensors") for name in ("ours", "theirs"))
    differing += [f"saved: {name}" for name in differences(ours, theirs)]
    differing += over_two_ranks(task, model_type, folder / "theirs", expected.state_dict())
    return Verdict("WRONG", f"{len(differing)} tensors: {', '.join(differing)}") if differing else Verdict("exact")


def over_two_ranks(task: str, model_type: str, folder: Path, expected: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that differ on one of two ranks, or that neither has. Both ranks run in this process."""
    differing = []
    left = set(expected)
    for rank in range(2):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_debug(pipeline_model_parallel_rank=rank, pipeline_model_parallel_size=2)
        given: dict[str, Any] = dict(ARGUMENTS.get(model_type, {}))
        model = NxDPPModel(build(task, model_type, "meta"), num_microbatches=2, **given)
        load_pretrained(model, folder)
        local = model.local_state_dict()
        wanted = {name: expected[name] for name in local if name in expected}
        differing += [f"rank {rank}: {name}" for name in differences(local, wanted)]
        left -= set(local)
    return differing + [f"no rank: {name}" for name in sorted(left)]


def randomise(model: nn.Module, seed: int) -> None:
    """Give random values to all saved floating-point parameters, from a generator with ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    unsaved = getattr(model, "_keys_to_ignore_on_save", None) or ()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point() and name not in unsaved:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))


def differences(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that only one of them has, or that differ in values or dtype."""
    names = sorted(tensors.keys() ^ expected.keys())
    for name in sorted(tensors.keys() & expected.keys()):
        if tensors[name].dtype is not expected[name].dtype or not torch.equal(
            tensors[name].cpu(), expected[name].cpu()
        ):
            names.append(name)
    return names

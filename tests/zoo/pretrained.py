"""Checkpoints of every transformer type: what ``load_pretrained`` and ``save_pretrained`` make of transformers' own.

    python -m tests.zoo.pretrained [TASK ...] [--jobs 2] [--type TYPE]

For each type that ``tests.zoo.training`` has, a model with random weights is saved by its own ``save_pretrained``
and loaded into a wrapped model of other weights, and into one on the meta device, on one rank and as each of two. All
parameters and buffers, on one rank unsaved ones too, are compared with those of ``from_pretrained``, bit for bit; then
what ``save_pretrained`` writes with the tensors of transformers' file. A type is exact, WRONG, refused (with what
message), or cannot be compared, because transformers itself does not load what it saved. The exit status is 1 where
one is wrong.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from nxdpp import NxDPPModel, load_pretrained, parallel_state, save_pretrained
from nxdpp.tracing.errors import TracingError
from tests.zoo import ARGUMENTS, build
from tests.zoo.command import judge_every_type


def main() -> None:
    """Print one line a type, and a summary of each task."""
    judge_every_type(judge, __doc__ or "")


def judge(task: str, model_type: str) -> tuple[str, str]:
    """What kind of result a type has, and why in words."""
    parallel_state.initialize_model_parallel()
    with tempfile.TemporaryDirectory() as folder:
        return compare(task, model_type, Path(folder))


def compare(task: str, model_type: str, folder: Path) -> tuple[str, str]:
    """As ``judge``, with files in ``folder``."""
    saved: Any = build(task, model_type)
    randomise(saved, 1)
    try:
        saved.save_pretrained(folder / "theirs")
        expected: Any = type(saved).from_pretrained(folder / "theirs")
    except Exception as error:
        return "not comparable", f"{type(error).__name__}: {error}"
    real, empty = build(task, model_type), build(task, model_type, "meta")
    randomise(real, 2)
    given: dict[str, Any] = dict(ARGUMENTS.get(model_type, {}))
    try:
        wrapped = [NxDPPModel(model, **given) for model in (real, empty)]
    except TracingError as error:
        return "refused", f"{type(error).__name__}: {error}"
    except ValueError as error:
        return "refused", f"ValueError: {error}"
    differing = []
    for kind, model in zip(("real", "meta"), wrapped, strict=True):
        load_pretrained(model, folder / "theirs")
        differing += [f"{kind}: {name}" for name in differences(model.local_state_dict(), expected.state_dict())]
        buffers = dict(model.local_named_buffers()), dict(expected.named_buffers())
        differing += [f"{kind}: {name}" for name in differences(*buffers)]
    save_pretrained(wrapped[1], folder / "ours")
    ours, theirs = (load_file(folder / name / "model.safetensors") for name in ("ours", "theirs"))
    differing += [f"saved: {name}" for name in differences(ours, theirs)]
    differing += over_two_ranks(task, model_type, folder / "theirs", expected.state_dict())
    return ("WRONG", f"{len(differing)} tensors: {', '.join(differing)}") if differing else ("exact", "")


def over_two_ranks(task: str, model_type: str, folder: Path, expected: dict[str, torch.Tensor]) -> list[str]:
    """What each of two ranks loads otherwise, and what none of them has, each rank in this process."""
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
    """Give all floating-point parameters that are saved values from a stream that begins with ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    unsaved = getattr(model, "_keys_to_ignore_on_save", None) or ()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point() and name not in unsaved:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))


def differences(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Names that only one of them has, or with other values or dtypes."""
    names = sorted(tensors.keys() ^ expected.keys())
    for name in sorted(tensors.keys() & expected.keys()):
        if tensors[name].dtype is not expected[name].dtype or not torch.equal(tensors[name], expected[name]):
            names.append(name)
    return names


if __name__ == "__main__":
    main()

"""OSLO's tutorial over 2 x 2 ranks: losses of one process, and a merged checkpoint with the bits of the ranks."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Adam
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM

import nxdpp.oslo as oslo
from nxdpp import parallel_state
from tests.support.run_ranks import run_ranks

FOLDER = str(Path(__file__).parents[3] / "examples" / "oslo")
STEPS, REPLICAS = 12, 2


def _tutorial() -> Any:
    sys.path.insert(0, FOLDER)
    try:
        return importlib.import_module("tutorial")
    finally:
        sys.path.remove(FOLDER)


def _arguments(folder: Path) -> list[str]:
    return f"--tensor-parallel-size 2 --steps {STEPS} --save-interval 4 --output {folder}".split()


def _run(rank: int, folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of the tutorial on this rank, and its part of the weights after the training."""
    tutorial = _tutorial()
    losses = tutorial.main(_arguments(folder))
    # Merging before a training gives the model itself.
    untrained = oslo.initialize(
        tutorial.make_model(7), config=tutorial.config(tutorial.read_arguments(_arguments(folder)))
    )
    untrained.save_parallelized(folder / "untrained", merge_checkpoints=True)
    parts = torch.load(folder / "parallel_ckpt" / f"pytorch_model_tp_{rank % 2}_pp_0.bin")
    parallel_state.destroy_model_parallel()
    return losses, parts


def _of_one_process() -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Losses by replica, and the weights, of the whole model and the samples of both replicas."""
    tutorial = _tutorial()
    args = tutorial.read_arguments(["--steps", str(STEPS)])
    model = tutorial.make_model(args.seed)
    optimizer = Adam(model.parameters(), lr=args.learning_rate)
    datasets, tokenizer = tutorial.make_data(args.steps)
    samplers: list[Any] = [DistributedSampler(datasets, REPLICAS, rank, shuffle=True) for rank in range(REPLICAS)]
    loaders = [DataLoader(datasets, tutorial.BATCH_SIZE, sampler=sampler) for sampler in samplers]
    losses: list[list[float]] = [[] for _ in range(REPLICAS)]
    for batches in zip(*loaders, strict=True):
        optimizer.zero_grad()
        for replica, batch in enumerate(batches):
            inputs = tutorial.make_batch(tokenizer, batch)
            loss = model(**inputs, labels=inputs["input_ids"]).loss
            (loss / REPLICAS).backward()
            losses[replica].append(float(loss.detach()))
        optimizer.step()
    return losses, model.state_dict()


def test_the_tutorial_equals_one_process(tmp_path: Path) -> None:
    expected, weights = _of_one_process()

    results = run_ranks(4, _run, tmp_path)

    for rank, (losses, _) in enumerate(results):
        assert losses == pytest.approx(expected[rank // 2], abs=1e-5)
        assert len(losses) == STEPS // REPLICAS
        assert losses[-1] < losses[0] - 0.3
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged_ckpt").state_dict()
    assert sorted(path.name for path in (tmp_path / "merged_ckpt").iterdir()) == ["config.json", "pytorch_model.bin"]
    parts = [results[rank][1] for rank in range(2)]
    for name, tensor in merged.items():
        assert torch.equal(tensor, _joined(name, [part[name] for part in parts], tensor.shape)), name
        assert torch.allclose(tensor, weights[name], atol=1e-4), name
    untrained = AutoModelForCausalLM.from_pretrained(tmp_path / "untrained").state_dict()
    original = _tutorial().make_model(7).state_dict()
    assert all(torch.equal(tensor, original[name]) for name, tensor in untrained.items())


def _joined(name: str, parts: list[torch.Tensor], shape: torch.Size) -> torch.Tensor:
    """Join the parts of two ranks by hand: query, key and value are blocks of one tensor of GPT-2."""
    if parts[0].shape == shape:
        assert torch.equal(parts[0], parts[1])
        return parts[0]
    dim = next(dim for dim in range(len(shape)) if parts[0].shape[dim] != shape[dim])
    blocks = [part.chunk(3 if "c_attn" in name else 1, dim) for part in parts]
    return torch.cat([part[block] for block in range(len(blocks[0])) for part in blocks], dim)

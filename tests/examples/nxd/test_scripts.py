"""Scripts of the guides of NeuronX Distributed, tiny: several ranks train like one process."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from nxdpp import parallel_state
from tests.support.run_ranks import run_ranks

FOLDER = str(Path(__file__).parents[3] / "examples" / "nxd")
STEPS = 6
BERT_STEPS = 24
BERT_ARGUMENTS = ["--steps", str(BERT_STEPS), "--batch-size", "8"]


def _train(rank: int, script: str, cases: list[list[str]]) -> list[list[float]]:
    """Losses of each case, one after the other in this process."""
    sys.path.insert(0, FOLDER)
    module = importlib.import_module(script)
    common = ["--steps", str(BERT_STEPS if script.startswith("bert") else STEPS), "--batch-size", "8"]
    return [module.train(module.read_arguments([*common, *case])) for case in cases]


def test_llama_of_the_pipeline_guide() -> None:
    whole = ["--num-microbatches", "2", "--tensor-parallel-size", "1"]
    sizes = ["--num-microbatches", "2", "--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"]
    ((expected,),) = run_ranks(1, _train, "llama_pipeline", [whole])
    for (found,) in run_ranks(4, _train, "llama_pipeline", [[*sizes, "--sequence-parallel"]]):
        assert found == pytest.approx(expected, abs=1e-5)
    assert len(expected) == STEPS
    assert expected[-1] < expected[0] - 0.5


def _train_both_replicas(rank: int) -> list[list[float]]:
    """Losses of BERT by replica, in one process: each half of a batch is clipped by itself, then both are averaged."""
    sys.path.insert(0, FOLDER)
    bert = importlib.import_module("bert_tensor_parallel")
    args = bert.read_arguments([*BERT_ARGUMENTS, "--tensor-parallel-size", "1"])
    parallel_state.initialize_model_parallel()
    torch.manual_seed(args.seed)
    model = bert.parallel_bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, args.steps)
    losses: list[list[float]] = [[], []]
    norms = []
    for inputs, labels in bert.create_pretraining_dataset(args):
        gradients = []
        for replica in range(2):
            model.zero_grad()
            ids, targets = (each[replica::2].contiguous() for each in (inputs, labels))
            loss = model(input_ids=ids, labels=targets).loss
            loss.backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), bert.MAX_NORM).item())
            gradients.append([parameter.grad for parameter in model.parameters()])
            losses[replica].append(loss.item())
        for parameter, *both in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = None if both[0] is None else sum(both) / 2
        optimizer.step()
        scheduler.step()
    parallel_state.destroy_model_parallel()
    assert max(norms) > bert.MAX_NORM
    return losses


def test_bert_of_the_tensor_parallel_guide() -> None:
    (expected,) = run_ranks(1, _train_both_replicas)
    found = run_ranks(4, _train, "bert_tensor_parallel", [["--tensor-parallel-size", "2"]])
    for first, second, of_replica in ((found[0], found[1], expected[0]), (found[2], found[3], expected[1])):
        assert first == second
        assert first[0] == pytest.approx(of_replica, abs=1e-5)
    assert len(expected[0]) == BERT_STEPS
    assert expected[0][-1] < expected[0][0] - 0.5

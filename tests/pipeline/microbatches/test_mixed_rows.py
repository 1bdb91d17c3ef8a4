"""Losses that look at other rows: ``check_against_module="first"`` tells of them with numbers, and of nothing else."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from tests.support.kept_messages import KeptMessages
from tests.support.run_ranks import run_ranks

ROWS, WIDTH = 8, 8


def pairs(output: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output @ other.T, torch.arange(len(output)))


def labels(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target, ignore_index=0)


def halves(output: torch.Tensor) -> torch.Tensor:
    """Chosen and rejected rows, as halves of a batch."""
    chosen, rejected = output.mean(1).chunk(2)
    return -nn.functional.logsigmoid(4 * (chosen - rejected)).mean()


def means(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target)


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"x": torch.randn(ROWS, WIDTH, generator=generator), "other": torch.randn(ROWS, WIDTH, generator=generator)}


def sums(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target, reduction="sum")


TARGET = torch.tensor([1, 0, 0, 1, 2, 3, 4, 5])
CASES: dict[str, tuple[Any, Any, dict[str, torch.Tensor]]] = {
    "contrastive": (nn.Identity, pairs, {"other": batch()["other"]}),
    "batch norm": (lambda: nn.BatchNorm1d(WIDTH), means, {"target": TARGET}),
    "labels": (nn.Identity, labels, {"target": TARGET}),
    "pairs": (nn.Identity, halves, {}),
    "sum": (nn.Identity, sums, {"target": TARGET}),
    "rows": (nn.Identity, means, {"target": TARGET}),
}


def build(middle: Any) -> nn.Sequential:
    torch.manual_seed(0)
    ends = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    return nn.Sequential(ends[0], ends[1], middle(), ends[2], ends[3])


def wrapped(name: str, **arguments: Any) -> NxDPPModel:
    middle, loss_fn, _ = CASES[name]
    common: dict[str, Any] = {"num_microbatches": 4, "transformer_layer_cls": nn.Linear, "loss_fn": loss_fn}
    return NxDPPModel(build(middle), broadcast_and_average_loss=True, **{**common, **arguments})


def told(kept: KeptMessages, name: str) -> tuple[list[str], list[str], float, float]:
    """Return what a first and later steps say, the loss of the first, and the loss of one process over the batch."""
    kept.texts.clear()
    middle, loss_fn, more = CASES[name]
    model = wrapped(name, check_against_module="first")
    inputs = {"input": batch()["x"], **more}
    loss = model.run_train(**inputs)
    first = len(kept.texts)
    model.run_train(**inputs)
    # Another layout of inputs is a batch that nothing is known of.
    model.run_train(**{key: torch.cat((value, value)) for key, value in inputs.items()})
    whole = loss_fn(build(middle)(batch()["x"]), **more)
    texts = [text for text in kept.texts if "check_against_module" in text or " in training (" in text]
    assert isinstance(loss, torch.Tensor)
    return texts, kept.texts[first:], loss.item(), whole.item()


Told = dict[str, tuple[list[str], list[str], float, float]]


def all_cases(rank: int) -> Told:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    kept = KeptMessages()
    return {name: told(kept, name) for name in CASES}


def test_the_first_step_tells_of_losses_that_mix_rows() -> None:
    first, others = run_ranks(2, all_cases)
    assert not any(texts for texts, *_ in others.values())
    for name, (texts, later, loss, whole) in first.items():
        assert not later, name
        if name == "rows":
            assert not texts
            assert loss == pytest.approx(whole)
            continue
        numbers = re.search(r"the whole batch is (\S+), the mean of its 4 microbatches (\S+): (.*)", texts[-1])
        assert numbers is not None, name
        assert ("this loss is a sum over rows, 4 times the mean" in numbers[3]) == (name == "sum")
        assert ("this loss mixes" in numbers[3]) == (name != "sum")
        assert float(numbers[1]) == pytest.approx(whole, rel=1e-5)
        assert float(numbers[2]) == pytest.approx(loss, rel=1e-5, nan_ok=True)
        assert len(texts) == 1 + (name == "batch norm")
        assert name != "batch norm" or "1 batch norm is in training (2 is the first)" in texts[0]

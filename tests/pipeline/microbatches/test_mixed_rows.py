"""Losses that look at other rows: ``check_against_module="first"`` tells of them with numbers, and of nothing else."""

import logging
import re
from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import NxDPPModel, parallel_state
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


class Counts(nn.Module):
    """Scales by the number of its calls."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls


TARGET = torch.tensor([1, 0, 0, 1, 2, 3, 4, 5])
CASES: dict[str, tuple[Any, Any, dict[str, torch.Tensor]]] = {
    "contrastive": (nn.Identity, pairs, {"other": batch()["other"]}),
    "batch norm": (lambda: nn.BatchNorm1d(WIDTH), means, {"target": TARGET}),
    "labels": (nn.Identity, labels, {"target": TARGET}),
    "pairs": (nn.Identity, halves, {}),
    "sum": (nn.Identity, sums, {"target": TARGET}),
    "state": (Counts, means, {"target": TARGET}),
    "rows": (nn.Identity, means, {"target": TARGET}),
    "group norm": (lambda: nn.GroupNorm(2, WIDTH), means, {"target": TARGET}),
}


def build(middle: Any) -> nn.Sequential:
    torch.manual_seed(0)
    ends = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    return nn.Sequential(ends[0], ends[1], middle(), ends[2], ends[3])


def told(rank: int, ranks: int, name: str) -> tuple[list[str], list[str], float, float]:
    """Return what a first and a second step say, the loss of the first, and the loss of one process over the batch."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ranks)
    texts: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    handler = Kept()
    logging.getLogger("nxdpp").addHandler(handler)
    middle, loss_fn, more = CASES[name]
    model = NxDPPModel(
        build(middle),
        num_microbatches=4,
        transformer_layer_cls=nn.Linear,
        loss_fn=loss_fn,
        broadcast_and_average_loss=True,
        check_against_module="first",
    )
    inputs = {"input": batch()["x"], **more}
    loss = model.run_train(**inputs)
    first = len(texts)
    model.run_train(**inputs)
    # Another layout of inputs is a batch that nothing is known of.
    model.run_train(**{key: torch.cat((value, value)) for key, value in inputs.items()})
    whole = loss_fn(build(middle)(batch()["x"]), **more)
    kept = [text for text in texts if "check_against_module" in text or " in training (" in text]
    return kept, texts[first:], loss.item(), whole.item()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_the_first_step_tells_of_losses_that_mix_rows(ranks: int, name: str) -> None:
    (first, later, loss, whole), *others = run_ranks(ranks, told, ranks, name)

    assert not later
    assert not any(texts for texts, *_ in others)
    if name in ("rows", "group norm"):
        assert not first
        assert loss == pytest.approx(whole)
        return
    numbers = re.search(r"the whole batch is (\S+), the mean of its 4 microbatches (\S+): (.*)", first[-1])
    assert numbers is not None
    assert numbers[3].startswith(
        "this loss is a sum over rows, 4 times the mean" if name == "sum" else "this loss mixes"
    )
    assert ("multiply it by the number of microbatches, 4" in numbers[3]) == (name == "sum")
    assert ("a layer keeps state" in numbers[3]) == (name != "sum")
    assert float(numbers[1]) == pytest.approx(whole, rel=1e-5)
    assert float(numbers[2]) == pytest.approx(loss, rel=1e-5, nan_ok=True)
    assert len(first) == 1 + (name == "batch norm")
    if name == "batch norm":
        assert "1 batch norm is in training (2 is the first)" in first[0]


def other_times(rank: int, ranks: int) -> list[str]:
    """Return what steps by different calls say of batch norms, each of a wrapper of its own."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ranks)
    texts: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    logging.getLogger("nxdpp").addHandler(Kept())
    common: dict[str, Any] = {"transformer_layer_cls": nn.Linear, "loss_fn": means}
    inputs = {"input": batch()["x"], "target": TARGET}
    parts = [{name: value[rows] for name, value in inputs.items()} for rows in (slice(4), slice(4, 8))]
    # One microbatch is the batch; norms in evaluation mode look at no rows; an evaluation trains nothing.
    one = NxDPPModel(build(CASES["batch norm"][0]), num_microbatches=1, **common)
    one.run_train(**inputs)
    one.run_train_microbatches([inputs])
    fixed = NxDPPModel(build(CASES["batch norm"][0]).eval(), num_microbatches=4, **common)
    fixed.run_train(**inputs)
    fixed.run_train_microbatches(parts)
    norms = NxDPPModel(build(CASES["batch norm"][0]), num_microbatches=4, **common)
    norms.eval()
    norms.run_eval(**inputs)
    assert not [text for text in texts if " in training (" in text]
    norms.train()
    norms.run_train(**inputs)
    # The number of microbatches may change from step to step.
    given = NxDPPModel(build(CASES["batch norm"][0]), num_microbatches=4, **common)
    given.run_train_microbatches([inputs])
    given.run_train_microbatches(parts)
    given.run_train_microbatches(parts)
    samples = NxDPPModel(build(CASES["batch norm"][0]), num_microbatches=2, **common)
    samples.steps.train_samples(parts)
    # The call of PipelineTrainer.
    trained = NxDPPModel(build(CASES["batch norm"][0]), num_microbatches=2, **common)
    trained.steps.train_microbatches(parts)
    return [text for text in texts if " in training (" in text]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_batch_norms_are_named_once_where_they_take_statistics(ranks: int) -> None:
    first, *others = run_ranks(ranks, other_times, ranks)

    assert [re.findall(r"one of (\d) microbatches", text) for text in first] == [["4"], ["2"], ["2"], ["2"]]
    assert not any(others)


def with_their_pairs(inputs: dict[str, Any], microbatches: int) -> list[dict[str, Any]]:
    """Each microbatch has chosen rows, and then the rejected rows that belong to them."""
    chosen, rejected = (half.chunk(microbatches) for half in inputs["input"].chunk(2))
    return [{"input": torch.cat(rows)} for rows in zip(chosen, rejected, strict=True)]


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "one loss": ("contrastive", {"loss_over": "batch", "schedule": "gpipe"}),
    "pairs together": ("pairs", {"split_inputs_fn": with_their_pairs}),
    "all labels": (
        "labels",
        {"loss_normalization": "tokens", "count_items_fn": lambda inputs: (inputs["target"] != 0).sum()},
    ),
    "one microbatch": ("batch norm", {"num_microbatches": 1}),
}


def out(ranks: int, way: str) -> tuple[float, float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The loss and gradients of a step, and those of one process over the whole batch."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ranks)
    name, arguments = WAYS[way]
    middle, loss_fn, more = CASES[name]
    common = {"num_microbatches": 4, "transformer_layer_cls": nn.Linear, "loss_fn": loss_fn, **arguments}
    model = NxDPPModel(build(middle), broadcast_and_average_loss=True, **common)
    loss = model.run_train(input=batch()["x"], **more)
    whole = build(middle)
    expected = loss_fn(whole(batch()["x"]), **more)
    expected.backward()
    own = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    theirs = {name: parameter.grad for name, parameter in whole.named_parameters() if parameter.grad is not None}
    return loss.item(), expected.item(), own, {name: theirs[name] for name in own}


def all_out(rank: int, ranks: int) -> dict[str, Any]:
    return {way: out(ranks, way) for way in WAYS}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_a_way_out_has_the_loss_of_the_whole_batch(ranks: int) -> None:
    found = [own[way] for own in run_ranks(ranks, all_out, ranks) for way in WAYS]
    for loss, expected, ours, theirs in found:
        assert loss == pytest.approx(expected, rel=1e-5)
        assert ours
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)

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


def other_times(kept: KeptMessages) -> list[str]:
    """Return what steps by different calls say of batch norms, each of a wrapper of its own."""
    kept.texts.clear()
    inputs = {"input": batch()["x"], "target": TARGET}
    parts = [{name: value[rows] for name, value in inputs.items()} for rows in (slice(4), slice(4, 8))]
    # One microbatch is the batch; norms in evaluation mode look at no rows; an evaluation trains nothing.
    one = wrapped("batch norm", num_microbatches=1)
    one.run_train(**inputs)
    norms = wrapped("batch norm")
    norms.eval()
    norms.run_eval(**inputs)
    norms.run_train(**inputs)
    assert not [text for text in kept.texts if " in training (" in text]
    norms.train()
    norms.run_train(**inputs)
    # The number of microbatches may change from step to step.
    given = wrapped("batch norm")
    given.run_train_microbatches([inputs])
    given.run_train_microbatches(parts)
    given.run_train_microbatches(parts)
    wrapped("batch norm", num_microbatches=2).steps.train_samples(parts)
    return [text for text in kept.texts if " in training (" in text]


def with_their_pairs(inputs: dict[str, Any], microbatches: int) -> list[dict[str, Any]]:
    """Each microbatch has chosen rows, and then the rejected rows that belong to them."""
    chosen, rejected = (half.chunk(microbatches) for half in inputs["input"].chunk(2))
    return [{"input": torch.cat(rows)} for rows in zip(chosen, rejected, strict=True)]


def number_of_labels(inputs: dict[str, Any]) -> Any:
    return (inputs["target"] != 0).sum()


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "one loss": ("contrastive", {"loss_over": "batch", "schedule": "gpipe"}),
    "pairs together": ("pairs", {"split_inputs_fn": with_their_pairs}),
    "all labels": ("labels", {"loss_normalization": "tokens", "count_items_fn": number_of_labels}),
    "one microbatch": ("batch norm", {"num_microbatches": 1}),
}


def check_way(name: str, arguments: dict[str, Any]) -> None:
    """The loss and gradients of a step are those of one process over the whole batch."""
    middle, loss_fn, more = CASES[name]
    model = wrapped(name, **arguments)
    loss = model.run_train(input=batch()["x"], **more)
    whole = build(middle)
    expected = loss_fn(whole(batch()["x"]), **more)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0)
    theirs = dict(whole.named_parameters())
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[key].grad, rtol=1e-4, atol=1e-6)


Told = dict[str, tuple[list[str], list[str], float, float]]


def all_cases(rank: int) -> tuple[Told, list[str]]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    kept = KeptMessages()
    for way in WAYS.values():
        check_way(*way)
    return {name: told(kept, name) for name in CASES}, other_times(kept)


def test_the_first_step_tells_of_losses_that_mix_rows_and_each_way_out_is_exact() -> None:
    (first, norms), (others, other_norms) = run_ranks(2, all_cases)
    assert not any(texts for texts, *_ in others.values())
    assert not other_norms
    assert [re.findall(r"one of (\d) microbatches", text) for text in norms] == [["4"], ["2"], ["2"]]
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

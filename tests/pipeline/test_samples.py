"""Steps of samples: their outputs on all ranks, and the gradients of one process."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers.modeling_outputs import SequenceClassifierOutput

from nxdpp import NxDPPModel, parallel_state
from nxdpp.tracing.values.nested import leaves_of
from tests.pipeline.in_turn import run_in_turn
from tests.pipeline.runtime.scheduled_models import Chain
from tests.support.plain_models import WIDTH

SAMPLES = 3


class Outputs(NamedTuple):
    """A loss and other outputs."""

    loss: torch.Tensor
    hidden: torch.Tensor


class Several(Chain):
    """Returns ``form`` of the loss, and of values of an early and the last stage that the loss does not need."""

    def __init__(self, form: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__(4)
        self.form = form

    def forward(self, x: torch.Tensor) -> Any:
        first = self.blocks[0](self.embedding(x))
        hidden = self.blocks[3](self.blocks[2](self.blocks[1](first)))
        out = self.head(hidden)
        return self.form(out.square().mean(), out, first.cos())


FORMS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]] = {
    "a loss": lambda loss, out, first: loss,
    "a tuple": lambda loss, out, first: (loss, out, {"first": [first, 3, "text", out]}),
    "a named tuple": lambda loss, out, first: Outputs(loss, out),
    "large tensors": lambda loss, out, first: [loss, out.double().expand(2, 3000), torch.complex(first, out)[:0]],
    "a model output": lambda loss, out, first: SequenceClassifierOutput(loss=loss, logits=out.expand(-1, 2).t()),
}


def samples() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(2, WIDTH, generator=generator)} for _ in range(SAMPLES)]


def loss_of(output: Any) -> torch.Tensor:
    found: torch.Tensor = output["loss"] if isinstance(output, dict) else leaves_of(output)[0]
    return found


def make(form: str) -> nn.Module:
    torch.manual_seed(0)
    return Several(FORMS[form])


def assert_trains_alike(
    make_model: Callable[[], nn.Module],
    given: Sequence[Mapping[str, Any]],
    transform: Callable[[int, torch.Tensor], torch.Tensor] | None = None,
    **settings: Any,
) -> None:
    """Assert that outputs and gradients of two steps are those of one process to the last bit, on this rank."""
    model = make_model()
    whole = copy.deepcopy(model)
    pipeline = NxDPPModel(model, num_microbatches=len(given), **settings)
    for _ in range(2):
        ours = pipeline.steps.train_samples(given, transform)
        theirs = [whole(**sample) for sample in given]
        for number, output in enumerate(theirs):
            loss = loss_of(output)
            loss = loss if transform is None else transform(number, loss)
            (loss if settings.get("gradient_reduction") == "sum" else loss / len(given)).backward()
        assert_equal(ours, theirs)
    expected = dict(whole.named_parameters())
    for name, parameter in pipeline.local_module.named_parameters():
        assert_equal(parameter.grad, expected[name].grad)
    whole.eval()
    pipeline.original_module.eval()
    assert_equal(pipeline.steps.eval_samples(given), [whole(**sample) for sample in given])


def assert_equal(ours: Any, theirs: Any) -> None:
    """Assert equal structures, values and bits; no tensor of ``ours`` has a graph."""
    assert pytree.tree_structure(ours) == pytree.tree_structure(theirs)
    for own, other in zip(leaves_of(ours), leaves_of(theirs), strict=True):
        if isinstance(other, torch.Tensor):
            assert not own.requires_grad
            assert own.dtype == other.dtype
            assert own.stride() == other.stride()
            assert torch.equal(own, other)
        else:
            assert own == other


def test_gradients_are_those_of_the_sum(one_rank: None) -> None:
    settings: dict[str, Any] = {"virtual_pipeline_size": 2, "gradient_reduction": "sum"}
    assert_trains_alike(lambda: make("a tuple"), samples(), **settings, check_against_module="first")
    model = make("a loss")
    whole = copy.deepcopy(model)
    wrapped = NxDPPModel(model, num_microbatches=SAMPLES, return_mb_loss=True, **settings)
    losses = wrapped.run_train(x=torch.cat([sample["x"] for sample in samples()]))
    expected = [whole(**sample) for sample in samples()]
    sum(expected).backward()
    assert losses == expected
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (samples()[:2], ValueError, r"num_microbatches=3, and was given 2 samples\. Give 3 of them"),
    (samples()[0], TypeError, r"the samples must be a list of the inputs of each microbatch, not \{"),
    ([torch.ones(2, WIDTH)] * 3, TypeError, r"inputs must be a dict by name, not a Tensor"),
]


TRANSFORMS: list[Callable[[int, torch.Tensor], Any]] = [
    lambda number, loss: loss.detach(),
    lambda number, loss: 0.0,
    lambda number, loss: torch.stack([loss, loss]),
]


def test_other_samples_and_transforms_are_refused(one_rank: None) -> None:
    pipeline = NxDPPModel(make("a loss"), num_microbatches=SAMPLES, virtual_pipeline_size=2)
    for given, kind, message in REFUSED:
        for call in (pipeline.steps.train_samples, pipeline.steps.eval_samples):
            with pytest.raises(kind, match=message):
                call(given)
    for transform in TRANSFORMS:
        with pytest.raises(ValueError, match=r"the transform of a loss must return a tensor of one element"):
            pipeline.steps.train_samples(samples(), transform)
    assert len(pipeline.steps.train_samples(samples())) == SAMPLES
    pipeline = NxDPPModel(make("a loss"), num_microbatches=SAMPLES, loss_normalization="tokens", count_items_fn=len)
    with pytest.raises(ValueError, match=r"loss_normalization='tokens' makes one loss of all samples"):
        pipeline.steps.train_samples(samples())


def over_ranks(rank: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, order=("data", "pipeline", "tensor"))
    for form in FORMS:
        assert_trains_alike(lambda form=form: make(form), samples())  # type: ignore[misc]
    assert_trains_alike(
        lambda: make("a tuple"),
        samples(),
        lambda number, loss: loss * (0.0, 3.0, -0.5)[number] + 1.0,
        schedule="zb-v",
        virtual_pipeline_size=2,
    )


def over_replicas(rank: int) -> None:
    parallel_state.initialize_model_parallel()
    given = [[{"x": sample["x"] + shift} for sample in samples()] for shift in (0.0, 1.0)]
    for at_once in (True, False):
        model = make("a loss")
        whole = copy.deepcopy(model)
        pipeline = NxDPPModel(model, num_microbatches=SAMPLES, virtual_pipeline_size=2, gradient_reduction="sum")
        pipeline.steps.train_samples(given[rank], average=at_once)
        if not at_once:
            pipeline.steps.average_gradients()
        expected = []
        for of_replica in given:
            whole.zero_grad()
            for sample in of_replica:
                whole(**sample).backward()
            expected.append([parameter.grad for parameter in whole.parameters()])
        for parameter, first, second in zip(model.parameters(), *expected, strict=True):
            assert first is not None
            assert second is not None
            assert_equal(parameter.grad, first + second)
    # Sums of both replicas are not added once more.
    with pytest.raises(RuntimeError, match=r"would be summed again\. Call zero_grad\(\) before the next step"):
        pipeline.steps.train_samples(given[rank])


def test_every_rank_gets_all_outputs_and_replicas_the_sum_of_gradients() -> None:
    run_in_turn(2, over_ranks, over_replicas)

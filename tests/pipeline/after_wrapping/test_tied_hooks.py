"""Hooks of the gradient of a tied weight: they see what they see in one process, the whole gradient of a microbatch."""

from typing import Any
from unittest.mock import patch

import pytest
import torch

from nxdpp import parallel_state
from nxdpp.gradients.replica_gradients import ReplicaGradients
from tests.pipeline.after_wrapping.scripts import PipelinedTraining, Script, compare
from tests.pipeline.after_wrapping.scripts import Training as Training
from tests.pipeline.after_wrapping.test_tied import Tied, tied_weight
from tests.support.run_ranks import run_ranks

LIMIT = 1e-3


def clamp(training: Training) -> None:
    handles = [weight.register_hook(lambda gradient: gradient.clamp(-LIMIT, LIMIT)) for weight in tied_weight(training)]
    training.steps(2)
    for handle in handles:
        handle.remove()
    training.steps(1)


def clamp_accumulated(weight: Any) -> None:
    weight.grad.clamp_(-LIMIT, LIMIT)


def clamp_sum(training: Training) -> None:
    """Clamp the gradient that has been accumulated so far."""
    for weight in tied_weight(training):
        weight.register_post_accumulate_grad_hook(clamp_accumulated)
    # Two backwards of the batch in a step.
    training.record.append(training.loss())
    training.steps(2)


SCRIPTS: dict[str, tuple[Any, Script]] = {each.__name__: (lambda: Tied().double(), each) for each in (clamp, clamp_sum)}


def seen(training: Training) -> list[float]:
    """The norms that hooks of the tied weight have seen in two steps."""
    norms: list[float] = []
    for weight in tied_weight(training):
        weight.register_hook(lambda gradient: norms.append(gradient.norm().item()))
        weight.register_post_accumulate_grad_hook(lambda weight: norms.append(weight.grad.norm().item()))
    training.steps(2)
    return norms


def compared(rank: int, schedule: str) -> tuple[dict[str, Any], list[float], list[float]]:
    result = compare(rank, 2, SCRIPTS, schedule=schedule)
    torch.manual_seed(0)
    alone = Training(Tied().double())
    torch.manual_seed(0)
    return result, seen(alone), seen(PipelinedTraining(Tied().double(), schedule=schedule))


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_hooks_see_the_gradient_of_each_microbatch(schedule: str) -> None:
    holders = (0,) if schedule == "zb-v" else (0, 1)
    for rank, (result, alone, pipelined) in enumerate(run_ranks(2, compared, schedule)):
        for name, (expected, losses) in result.items():
            # The sum of a tied gradient is in another order.
            assert losses == pytest.approx(expected, abs=1e-7), name
        assert pipelined == pytest.approx(alone if rank in holders else [], rel=1e-9)


def caught(rank: int) -> None:
    """A step that all ranks refuse leaves earlier gradients, hooks and the next step as they are."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    torch.manual_seed(0)
    training = PipelinedTraining(Tied().double())
    weight = training.model.get_parameter("embed.weight")
    norms: list[float] = []
    weight.register_hook(lambda gradient: norms.append(gradient.norm().item()))
    training.loss()
    assert weight.grad is not None
    earlier, expected = weight.grad.clone(), list(norms)
    refusal = patch.object(ReplicaGradients, "verify", side_effect=ValueError("refused before the step"))
    with refusal, pytest.raises(ValueError, match="refused before the step"):
        training.loss()
    assert torch.equal(weight.grad, earlier)
    norms.clear()
    training.loss()
    assert norms == expected
    # In another order: the microbatches are added one by one.
    torch.testing.assert_close(weight.grad, 2 * earlier, rtol=1e-12, atol=0)


def hook_on_one(rank: int) -> None:
    caught(rank)
    training = PipelinedTraining(Tied())
    training.steps(2)
    if rank == 1:
        training.model.get_parameter("embed.weight").register_post_accumulate_grad_hook(lambda weight: None)
    training.steps(1)


def test_a_refused_step_changes_nothing_and_a_hook_on_one_rank_is_refused() -> None:
    text = (
        r"embed\.weight is tied over the pipeline ranks \[0, 1\], and its gradient has 0 hooks on rank 0 and 1 on rank "
        r"1: the copies would go apart\. Register each hook on every rank"
    )
    with pytest.raises(AssertionError, match=text):
        run_ranks(2, hook_on_one)

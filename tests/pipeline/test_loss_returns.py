"""Types of ``run_train``'s result: ``mypy`` reads the ``assert_type`` here, and the ranks return what it says."""

from typing import Any, assert_type

import pytest
import torch
from torch import Tensor, nn

from nxdpp import NxDPPModel, parallel_state
from nxdpp.planning.plan import Plan
from tests.pipeline.after_wrapping.scripts import Layer, Plain
from tests.pipeline.after_wrapping.scripts import batch as tokens
from tests.support.models import make, microbatches, padded_batch
from tests.support.run_ranks import run_ranks


def results(rank: int) -> tuple[Tensor | None, Tensor, list[Tensor] | None, bool, list[Tensor]]:
    """Return the result of a step of each kind of model, and the losses of ``of_dtypes``."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    batch = padded_batch(4)
    plain = NxDPPModel(make("llama"), num_microbatches=2)
    mean = plain.run_train(**batch)
    assert_type(mean, Tensor | None)
    everywhere = NxDPPModel(make("llama"), num_microbatches=2, broadcast_and_average_loss=True).run_train(**batch)
    assert_type(everywhere, Tensor)
    each = NxDPPModel(make("llama"), num_microbatches=2, return_mb_loss=True).run_train(**batch)
    assert_type(each, list[Tensor] | None)
    return mean, everywhere, each, plain.holds_last_stage, of_dtypes()


def of_dtypes() -> list[Tensor]:
    """Return the losses of a model in float64, of one that becomes so after a step, and of one in bfloat16."""
    losses = []
    for dtypes, count in (([torch.float64], 1), ([torch.float32, torch.float64], 2), ([torch.bfloat16], 1)):
        torch.manual_seed(0)
        model = NxDPPModel(Plain(), Layer, num_microbatches=count, broadcast_and_average_loss=True)
        for dtype in dtypes:
            model.to(dtype)
            losses += [model.run_train(**tokens()) for _ in range(2)]
    return losses


@pytest.fixture(scope="module")
def of_ranks() -> list[Any]:
    return run_ranks(2, results)


def test_a_step_returns_the_type_that_type_checkers_infer(of_ranks: list[Any]) -> None:
    first, last = of_ranks

    assert first[0] is None
    assert first[2] is None
    assert isinstance(last[0], Tensor)
    assert isinstance(first[1], Tensor)
    assert isinstance(last[1], Tensor)
    assert isinstance(last[2], list)
    assert len(last[2]) == 2
    assert (first[3], last[3]) == (False, True)


def test_the_mean_loss_has_the_dtype_of_the_losses(of_ranks: list[Any]) -> None:
    """Bit for bit as in one process: the mean of one or two."""
    expected = []
    for dtype, count in ((torch.float64, 1), (torch.float32, 2), (torch.float64, 2), (torch.bfloat16, 1)):
        torch.manual_seed(0)
        whole = Plain().to(dtype)
        expected += [torch.stack([whole(**part) for part in microbatches(tokens(), count)]).mean()] * 2
    for *_, losses in of_ranks:
        for loss, own in zip(losses, expected, strict=True):
            assert loss.dtype == own.dtype
            assert torch.equal(loss, own)


def of_other_calls(module: nn.Module, found: Plan, flag: bool, options: dict[str, Any]) -> None:
    """For ``mypy`` alone."""
    assert_type(NxDPPModel(module, broadcast_and_average_loss=flag).run_train(), Tensor | None)
    assert_type(NxDPPModel(module, return_mb_loss=flag).run_train(), Tensor | list[Tensor] | None)
    assert_type(NxDPPModel(module, **options).run_train(), Any)
    assert_type(NxDPPModel.from_plan(module, found).run_train(), Tensor | None)
    assert_type(NxDPPModel.from_plan(module, found, broadcast_and_average_loss=True).run_train(), Tensor)
    assert_type(NxDPPModel.from_plan(module, found, return_mb_loss=True).run_train(), list[Tensor] | None)
    NxDPPModel(module, num_microbatch=4)  # type: ignore[call-arg]  # a mistyped name is one error
    NxDPPModel(module, num_microbatches="4")  # type: ignore[arg-type]  # so is a value of another type

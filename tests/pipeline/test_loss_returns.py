"""Types of ``run_train``'s result: ``mypy`` reads the ``assert_type`` here, and the ranks return what it says."""

import inspect
from typing import Any, Literal, assert_type

import pytest
from torch import Tensor, nn

from nxdpp import NxDPPModel, parallel_state
from nxdpp.planning.plan import Plan
from tests.support.models import make, padded_batch
from tests.support.run_ranks import run_ranks


def results(rank: int) -> tuple[Tensor | None, Tensor, list[Tensor] | None, bool]:
    """Return the result of a step of each kind of model, and whether one process in an evaluation has the same."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    batch = padded_batch(4)
    plain = NxDPPModel(make("llama"), num_microbatches=2)
    mean = plain.run_train(**batch)
    assert_type(mean, Tensor | None)
    everywhere = NxDPPModel(make("llama"), num_microbatches=2, broadcast_and_average_loss=True).run_train(**batch)
    assert_type(everywhere, Tensor)
    each = NxDPPModel(make("llama"), num_microbatches=2, return_mb_loss=True).run_train(**batch)
    assert_type(each, list[Tensor] | None)
    return mean, everywhere, each, plain.holds_last_stage


def test_a_step_returns_the_type_that_type_checkers_infer() -> None:
    first, last = run_ranks(2, results)

    assert first[0] is None
    assert first[2] is None
    assert isinstance(last[0], Tensor)
    assert isinstance(first[1], Tensor)
    assert isinstance(last[1], Tensor)
    assert isinstance(last[2], list)
    assert len(last[2]) == 2
    assert (first[3], last[3]) == (False, True)


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


def of_parameters(
    any_of_one_loss: NxDPPModel,
    of_all_ranks: NxDPPModel[Literal[True]],
    of_lists: NxDPPModel[Literal[False], Literal[True]],
) -> None:
    """For ``mypy`` alone."""
    assert_type(any_of_one_loss.run_train(), Tensor | None)
    assert_type(of_all_ranks.run_train(), Tensor)
    assert_type(of_lists.run_train(), list[Tensor] | None)
    of_parameters(of_all_ranks, of_all_ranks, of_lists)
    of_parameters(of_lists, of_all_ranks, of_lists)  # type: ignore[arg-type]  # of_lists returns no single loss


@pytest.mark.parametrize("name", ["return_mb_loss", "broadcast_and_average_loss"])
def test_a_reader_of_the_signature_sees_a_boolean(name: str) -> None:
    assert inspect.signature(NxDPPModel).parameters[name].annotation is bool

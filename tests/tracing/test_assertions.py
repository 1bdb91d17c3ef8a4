"""Assertions about data are taken to hold at tracing, and checked when the stages run."""

import pytest
import torch

from nxdpp.tracing.assertions import is_assertion
from nxdpp.tracing.errors import TracingError
from tests.pipeline.chained_stages import ChainedStages
from tests.tracing.asserting_model import AssertingModel
from tests.tracing.traced_models import PlainLayer, PlainModel, options_for, trace_with

GOOD = {"x": torch.ones(2, 4)}
BAD = {"x": torch.tensor([[1.0, 2, 3, 4], [-1, 2, 3, 4]])}


def test_each_is_checked_on_one_stage() -> None:
    model = AssertingModel()
    stages = ChainedStages(model, GOOD, 2, options_for(model, PlainLayer))
    assert [sum(map(is_assertion, plan.nodes)) for plan in stages.plans] == [3, 0]
    assert torch.equal(stages.run(GOOD), model(**GOOD))
    with pytest.raises(AssertionError, match=r"does not hold, at .*asserting_model.py:\d+, in forward"):
        stages.run(BAD)
    stages.run(GOOD)
    with pytest.raises(AssertionError, match=r"in prepare"):
        stages.run({"x": torch.full((2, 4), torch.inf)})


def test_other_questions_about_data_are_refused() -> None:
    class Asking(PlainModel):
        def prepare(self, hidden: torch.Tensor) -> torch.Tensor:
            if hidden.isnan().any():
                raise ValueError("not a number")
            return hidden

    model = Asking()
    with pytest.raises(TracingError, match="only the data tells"):
        trace_with(model, GOOD, options_for(model, PlainLayer))

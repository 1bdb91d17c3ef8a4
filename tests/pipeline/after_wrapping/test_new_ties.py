"""A tie that is made after wrapping, over stages: each rank would train a copy of its own."""

import pytest
import torch
from torch import nn

from nxdpp import parallel_state
from tests.pipeline.after_wrapping.scripts import (
    VOCABULARY,
    WIDTH,
    PipelinedTraining,
    Plain,
)
from tests.pipeline.after_wrapping.scripts import Training as Training
from tests.support.run_ranks import run_ranks

TEXT = "embed.weight and head.weight have become one parameter, and different pipeline ranks hold them"


def over_stages(rank: int) -> float:
    """Ties that are refused on every rank; returns the loss with the remedy, a tie before wrapping."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    for is_replaced, is_adapted in ((False, False), (True, False), (False, True)):
        torch.manual_seed(0)
        training = PipelinedTraining(Plain())
        training.steps(1)
        embed, head = training.model.get_submodule("embed"), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if is_replaced:
            embed.weight = nn.Parameter(torch.ones(VOCABULARY, WIDTH))
        if is_adapted:
            training.model.head = nn.Sequential(head)
        else:
            head = training.model.get_submodule("head")  # type: ignore[assignment]  # a Linear
        head.weight = embed.weight  # type: ignore[assignment]  # a parameter
        with pytest.raises(RuntimeError, match=TEXT.replace("head", "head.0") if is_adapted else TEXT):
            training.loss()
    return PipelinedTraining(tied()).loss()


def tied() -> nn.Module:
    torch.manual_seed(0)
    module = Plain()
    module.head.weight = module.embed.weight
    return module


def test_a_tie_over_stages_is_refused_on_every_rank_and_the_remedy_trains() -> None:
    assert run_ranks(2, over_stages) == [pytest.approx(Training(tied()).loss(), abs=1e-6)] * 2

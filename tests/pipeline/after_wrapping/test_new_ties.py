"""A tie that is made after wrapping, over stages: each rank would train a copy of its own."""

import pytest
import torch
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from tests.pipeline.after_wrapping.scripts import VOCABULARY, WIDTH, Layer, PipelinedTraining, Plain, batch
from tests.support.run_ranks import run_ranks

TEXT = "embed.weight and head.weight have become one parameter, and different pipeline ranks hold them"


def tied_late(rank: int, world_size: int, is_replaced: bool) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world_size)
    torch.manual_seed(0)
    training = PipelinedTraining(Plain())
    training.steps(1)
    embed, head = training.model.get_submodule("embed"), training.model.get_submodule("head")
    if is_replaced:
        embed.weight = nn.Parameter(torch.ones(VOCABULARY, WIDTH))
    head.weight = embed.weight
    with pytest.raises(RuntimeError, match=TEXT):
        training.loss()


@pytest.mark.parametrize(("world_size", "is_replaced"), [(2, True), (4, True), (2, False)])
def test_a_tie_over_stages_is_refused_on_every_rank(world_size: int, is_replaced: bool) -> None:
    run_ranks(world_size, tied_late, world_size, is_replaced)


def tied_early(rank: int) -> float:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    torch.manual_seed(0)
    module = Plain()
    module.head.weight = module.embed.weight
    model = NxDPPModel(module, transformer_layer_cls=Layer, num_microbatches=2, broadcast_and_average_loss=True)
    loss: torch.Tensor = model.run_train(**batch())
    return loss.item()


def test_the_remedy_trains() -> None:
    torch.manual_seed(0)
    module = Plain()
    module.head.weight = module.embed.weight
    assert run_ranks(2, tied_early) == [pytest.approx(module(**batch()).item(), abs=1e-6)] * 2

"""Ranks that no torchrun starts are initialised again and again in their processes, whoever starts the world."""

import os
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from tests.support.run_program import run_program

STARTS = 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def main(world: str) -> None:
    """Start ``STARTS`` times; the model of a start, which holds its groups, lives until the next model."""
    if world == "of the user":
        dist.init_process_group("gloo")
    for start in range(STARTS):
        size = 2 if start % 2 else int(os.environ["WORLD_SIZE"])
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=size, backend="gloo")
        torch.manual_seed(0)
        model = NxDPPModel(Model(), transformer_layer_cls=nn.Linear, num_microbatches=2)
        model.run_train(x=torch.ones(2, 4))
        parallel_state.destroy_model_parallel()
        print(f"start {start}", flush=True)
    if world == "of the user afterwards":
        dist.init_process_group("gloo")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


@pytest.mark.parametrize(("ranks", "world"), [(4, "of the user"), (2, "of the user afterwards")])
def test_ranks_without_torchrun_start_again_and_again(ranks: int, world: str) -> None:
    ended = run_program(__file__, [world], ranks, timeout=120.0, first_rank_has_store=True, own_outputs=True)
    printed = "".join(f"---- rank {rank}:\n{output}" for rank, output in enumerate(ended.outputs))
    assert ended.codes == [0] * ranks, printed
    assert printed.count("start ") == STARTS * ranks, printed


if __name__ == "__main__":
    main(sys.argv[1])

"""One rank that runs a step for each schedule family on its standard input, and prints its seconds.

It prints the wall time of a step, the processor time of the process and of its main thread.
``before_and_after.py`` starts it with the nxdpp of either tree. It uses only names that both trees have.
"""

import json
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

from nxdpp import NxDPPModel, parallel_state

WIDTH = 256


class ScaledLayer(nn.Module):
    """One multiplication."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` (B, H) times the weight."""
        return x * self.weight


class ScaledStack(nn.Module):
    """Layers, and the loss of their output."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ScaledLayer() for _ in range(layers))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The mean squared distance from ``target`` (B, H)."""
        for layer in self.layers:
            x = layer(x)
        return (x - target).square().mean()


def main(ranks: int, microbatches: int, families: dict[str, int], message: int) -> None:
    """Wrap a model for each of ``families`` (name: stages of a rank), then run steps until the input ends.

    Stages exchange tensors of ``message`` KiB, which is their number of rows (a row has 256 floats).
    """
    torch.set_num_threads(1)
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ranks)
    batch = (microbatches * message, WIDTH)
    x, target = torch.randn(2, *batch, generator=torch.Generator().manual_seed(0))
    models = {
        family: NxDPPModel(
            ScaledStack(ranks * chunks), ScaledLayer, microbatches, virtual_pipeline_size=chunks, schedule=family
        )
        for family, chunks in families.items()
    }
    print("ready", flush=True)
    for line in sys.stdin:
        model = models[line.strip()]
        for parameter in model.parameters():
            parameter.grad = None
        # All ranks begin at one moment.
        dist.barrier()
        start = torch.tensor([time.perf_counter() + 0.01], dtype=torch.float64)
        dist.broadcast(start, src=0)
        time.sleep(max(0.0, start.item() - time.perf_counter()))
        process, thread = time.process_time(), time.thread_time()
        model.run_train(x=x, target=target)
        wall = time.perf_counter() - start.item()
        print(wall, time.process_time() - process, time.thread_time() - thread, flush=True)


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))

"""Program that initialises and destroys model parallelism ``CYCLES`` times, with a training step in each cycle.

Run as ``cycled_program.py CYCLES FOLDER`` on two ranks, with an empty folder for temporary files. Each rank
prints what the cycles after the third have left behind.
"""

import gc
import os
import re
import sys
import tempfile
import threading

import torch
from torch import nn

from nxdpp import NxDPPModel, parallel_state

_WARM_CYCLES = 3


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def holdings() -> dict[str, int]:
    """Return numbers of what a process holds of the system; memory in MiB."""
    with open("/proc/self/status") as file:
        memory = re.search(r"VmRSS:\s*(\d+) kB", file.read())
    assert memory is not None
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "tasks": len(os.listdir("/proc/self/task")),
        "temporary files": len(os.listdir(tempfile.gettempdir())),
        "MiB": int(memory[1]) // 1024,
    }


def main() -> None:
    cycles, before = int(sys.argv[1]), {}
    tempfile.tempdir = sys.argv[2]
    for cycle in range(cycles):
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, backend="gloo")
        torch.manual_seed(0)
        model = NxDPPModel(Model(), transformer_layer_cls=nn.Linear, num_microbatches=2)
        model.run_train(x=torch.ones(2, 4))
        del model
        parallel_state.destroy_model_parallel()
        gc.collect()
        if cycle == _WARM_CYCLES - 1:
            before = holdings()
    after = holdings()
    left = {name: number - before[name] for name, number in after.items() if number > before[name]}
    # One write: the ranks share a file, and ``print`` writes the end of a line apart.
    sys.stdout.write(f"rank {os.environ['RANK']}, {cycles} cycles, left behind: {left}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

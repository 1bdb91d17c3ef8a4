"""Processes that keep the other cores of this machine as busy as ranks do, while one of them is measured."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_READY = "ready"
_LAYER = f"""
import torch

torch.set_num_threads(1)
x, weight = torch.randn(256, 512, requires_grad=True), torch.randn(1376, 512, requires_grad=True)
back = torch.randn(512, 1376, requires_grad=True)
print({_READY!r}, flush=True)
while True:
    (torch.nn.functional.silu(x @ weight.t()) @ back.t() + x).softmax(-1).sum().backward()
"""


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Run ``processes`` other processes meanwhile, each with the forward and backward of a layer on one thread."""
    running = [subprocess.Popen([sys.executable, "-c", _LAYER], stdout=subprocess.PIPE) for _ in range(processes)]
    try:
        for each in running:
            assert each.stdout is not None
            each.stdout.readline()
        yield
    finally:
        for each in running:
            each.kill()
            each.communicate()

"""Memory and fragmentation of ``deferred_init``."""

from torch import nn

from nxdpp import deferred_init
from tests.support.process_memory import peak_bytes, reset_peak, resident_bytes
from tests.support.run_ranks import run_ranks

LAYERS, WIDTH = 40, 512
ALLOWED_BYTES = 20 * 2**20


class Stack(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))


def growth(_: int) -> int:
    deferred_init(Stack, 2, 4)
    reset_peak()
    before = resident_bytes()
    deferred_init(Stack, LAYERS, WIDTH)
    return peak_bytes() - before


def test_many_parameters_need_the_scratch_memory_of_one() -> None:
    (taken,) = run_ranks(1, growth)
    assert taken < ALLOWED_BYTES

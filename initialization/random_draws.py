"""What drawing random numbers does to a generator, without the memory for the numbers."""

from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from nxdpp.initialization import mersenne_twister

aten = torch.ops.aten
_SCRATCH = 1 << 18  # elements drawn at a time
_WORTH_A_JUMP = 1 << 22  # numbers whose drawing takes longer than to jump over them

_NORMAL = {aten.normal_, aten.randn, aten.randn_like, aten.normal_functional}
_UNIFORM = {aten.uniform_, aten.rand, aten.rand_like}
_BLOCK = 16  # normal numbers that torch makes at a time, of as many uniform ones


def is_random(function: Any) -> bool:
    """Whether ``function`` draws from a generator."""
    return torch.Tag.nondeterministic_seeded in function.tags


def can_skip(function: Any, result: torch.Tensor) -> bool:
    """Whether what ``function`` draws for ``result`` follows from the latter's shape, strides and dtype."""
    return function.overloadpacket in _NORMAL | _UNIFORM and result.dtype.is_floating_point


def skip(function: Any, result: torch.Tensor, generator: torch.Generator) -> None:
    """Leave ``generator`` as ``function`` does that fills ``result``, which may be on the meta device.

    Uniform numbers are drawn one after the other, whatever the strides. Normal ones are made in blocks of 16 uniform
    ones where there are at least 16 that lie contiguously, else in pairs one after the other.
    """
    count = result.numel()
    if function.overloadpacket in _UNIFORM:
        _draw_uniform(count, result.dtype, generator)
    elif count >= _BLOCK and result.is_contiguous():
        # How an incomplete last block is made up differs by dtype, so torch does it itself.
        last = _BLOCK + count % _BLOCK
        _draw_uniform(count - last, result.dtype, generator)
        torch.empty(last, dtype=result.dtype, device="cpu").normal_(generator=generator)
    else:
        _draw_in_pairs(count, result.dtype, generator)


def _draw_uniform(count: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    draws_each = _draws_each(dtype) if count >= _WORTH_A_JUMP else None
    if draws_each is not None:
        mersenne_twister.jump(generator, count * draws_each)
        return
    scratch = _scratch(dtype)
    for start in range(0, count, _SCRATCH):
        scratch[: count - start].uniform_(generator=generator)


@cache
def _draws_each(dtype: torch.dtype) -> int | None:
    """How many draws of 32 bits a uniform number is made of; None if this torch's generator is not the one we know."""
    count = 10_000
    drawn = torch.Generator().manual_seed(1)
    torch.empty(count, dtype=dtype, device="cpu").uniform_(generator=drawn)
    for each in (1, 2):
        jumped = torch.Generator().manual_seed(1)
        mersenne_twister.jump(jumped, count * each)
        if torch.equal(jumped.get_state(), drawn.get_state()):
            return each
    return None


def _draw_in_pairs(count: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    scratch = _scratch(dtype).view(-1, 2)[:, 0]
    for start in range(0, count, len(scratch)):
        scratch[: count - start].normal_(generator=generator)


@cache
def _scratch(dtype: torch.dtype) -> torch.Tensor:
    """Memory for all draws: were it another for each, what is made between them would keep it from being reused."""
    with _disable_current_modes(), torch.inference_mode(False):
        return torch.empty(_SCRATCH, dtype=dtype, device="cpu")

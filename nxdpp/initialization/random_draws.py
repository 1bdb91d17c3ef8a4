"""Advance of a generator by the random numbers of an operation, without memory for the numbers."""

from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from nxdpp.initialization import mersenne_twister

aten = torch.ops.aten
_SCRATCH = 1 << 18  # elements drawn at a time
_WORTH_A_JUMP = 1 << 22  # more numbers than this take longer to draw than to jump over

_NORMAL = {aten.normal_, aten.randn, aten.randn_like, aten.normal_functional}
_UNIFORM = {aten.uniform_, aten.rand, aten.rand_like}
_BLOCK = 16  # torch makes normal numbers in blocks, from as many uniform ones


def is_random(function: Any) -> bool:
    """Return whether ``function`` draws from a generator."""
    return torch.Tag.nondeterministic_seeded in function.tags


def can_skip(function: Any, result: torch.Tensor) -> bool:
    """Return whether the draws of ``function`` depend only on shape, strides and dtype of ``result``."""
    return function.overloadpacket in _NORMAL | _UNIFORM and result.dtype.is_floating_point


def skip(function: Any, result: torch.Tensor, generator: torch.Generator) -> None:
    """Advance ``generator`` as ``function`` does when it fills ``result``, which may be on the meta device.

    torch draws uniform numbers one by one. It makes normal numbers in blocks of 16 uniform ones if at least 16 are
    contiguous, else in pairs.
    """
    count = result.numel()
    if function.overloadpacket in _UNIFORM:
        _draw_uniform(count, result.dtype, generator)
    elif count >= _BLOCK and result.is_contiguous():
        # The way to fill an incomplete last block depends on the dtype, so torch draws it.
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
    """Number of 32-bit draws in a uniform number; None if torch's generator is not a known one."""
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
    """Scratch memory for all draws. New memory for each draw would fragment the heap."""
    with _disable_current_modes(), torch.inference_mode(False):
        return torch.empty(_SCRATCH, dtype=dtype, device="cpu")

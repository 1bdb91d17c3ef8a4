"""Jump of torch's CPU generator over many draws at once: the random numbers of an operation take no memory.

The generator is a Mersenne Twister: its words are a linear recurrence over the field of two elements. So a word far
ahead is a sum (XOR) of some of the next 19937 words. They follow from the remainder of a power of x by the
characteristic polynomial of the recurrence. The method is from "Efficient Jump Ahead for F2-Linear Random Number
Generators" (Haramoto, Matsumoto, Nishimura, Panneton, L'Ecuyer, 2008). A polynomial is an int: bit i is the
coefficient of x ** i.
"""

from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from nxdpp.ground.torch_names import NO_DISPATCH_MODES

Words = NDArray[np.uint32]

_WORDS = 624
_MIDDLE = 397
_TWIST = 0x9908B0DF
_DEGREE = 19937
_AT_A_TIME = 1024

# Positions in the bytes of a generator's state.
_LEFT = slice(8, 12)
_NEXT = slice(16, 24)
_STATE = slice(24, 24 + 8 * _WORDS)


def jump(generator: torch.Generator, draws: int) -> None:
    """Advance the CPU ``generator`` by ``draws`` draws of 32 bits: in 3 ms, or 35 ms for a new number."""
    if draws == 0:
        return
    state = generator.get_state()
    drawn = _WORDS - int(state[_LEFT].view(torch.int32)) + 1  # of the present block of words
    blocks, last = divmod(drawn + draws - 1, _WORDS)
    if blocks:
        words = state[_STATE].view(torch.int64)
        words.copy_(torch.from_numpy(_words_after(words.numpy().astype(np.uint32), blocks).astype(np.int64)))
    state[_LEFT].view(torch.int32).fill_(_WORDS - last)
    state[_NEXT].view(torch.int64).fill_(last + 1)
    generator.set_state(state)


def _words_after(words: Words, blocks: int) -> Words:
    """The block of words ``blocks`` blocks after ``words``."""
    windows = sliding_window_view(_continued(words, _WORDS + _DEGREE + 1), _WORDS)
    # The recurrence uses one bit only of the first word of a window, so the sum starts one word later.
    summands = _power_of_x(_WORDS * blocks - 1) + 1
    result = np.zeros(_WORDS, np.uint32)
    for start in range(0, len(summands), _AT_A_TIME):
        result ^= np.bitwise_xor.reduce(windows[summands[start : start + _AT_A_TIME]], axis=0)
    return result


def _continued(words: Words, length: int) -> Words:
    """``words`` and the words that follow them, ``length`` in total."""
    result = np.empty(length, np.uint32)
    result[:_WORDS] = words
    step = _WORDS - _MIDDLE  # this many words do not depend on each other
    for start in range(_WORDS, length, step):
        end = min(start + step, length)
        first = slice(start - _WORDS, end - _WORDS)
        mixed = (result[first] & 0x80000000) | (result[first.start + 1 : first.stop + 1] & 0x7FFFFFFF)
        far = result[start - _WORDS + _MIDDLE : end - _WORDS + _MIDDLE]
        result[start:end] = far ^ (mixed >> 1) ^ ((mixed & 1) * np.uint32(_TWIST))
    return result


@lru_cache(maxsize=256)
def _power_of_x(exponent: int) -> NDArray[np.int64]:
    """Exponents in the remainder of ``x ** exponent`` by the characteristic polynomial."""
    squarings = max(0, exponent.bit_length() - _DEGREE.bit_length() + 1)
    power = 1 << (exponent >> squarings)
    for place in reversed(range(squarings)):
        # Bit i of a square moves to bit 2i, as the digits of base 2 read in base 4.
        power = _remainder(int(f"{power:b}", 4) << (exponent >> place & 1))
    return np.array(_exponents(power))


def _remainder(polynomial: int) -> int:
    *lower, degree = _characteristic()
    while high := polynomial >> degree:
        polynomial ^= high << degree
        for exponent in lower:
            polynomial ^= high << exponent
    return polynomial


@cache
def _characteristic() -> tuple[int, ...]:
    """Exponents of the characteristic polynomial, ascending (Matsumoto, Nishimura: Mersenne Twister, 1998)."""
    polynomial = 1
    for place in range(31):
        polynomial = (polynomial << _WORDS - 1) ^ (polynomial << _MIDDLE - 1) ^ (_TWIST >> place & 1)
    return tuple(_exponents((polynomial << _WORDS) ^ (polynomial << _MIDDLE) ^ (_TWIST >> 31)))


def _exponents(polynomial: int) -> list[int]:
    return [place for place, bit in enumerate(reversed(f"{polynomial:b}")) if bit == "1"]


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
        jump(generator, count * draws_each)
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
        jump(jumped, count * each)
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
    with NO_DISPATCH_MODES(), torch.inference_mode(False):
        return torch.empty(_SCRATCH, dtype=dtype, device="cpu")

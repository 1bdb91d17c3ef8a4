"""Jump of torch's CPU generator over many draws at once.

The generator is a Mersenne Twister: its words are a linear recurrence over the field of two elements. So a word far
ahead is a sum (XOR) of some of the next 19937 words. They follow from the remainder of a power of x by the
characteristic polynomial of the recurrence. The method is from "Efficient Jump Ahead for F2-Linear Random Number
Generators" (Haramoto, Matsumoto, Nishimura, Panneton, L'Ecuyer, 2008). A polynomial is an int: bit i is the
coefficient of x ** i.
"""

from functools import cache, lru_cache

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

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

"""Time axis of a drawing in a terminal: round steps, and numbers of times."""

import math
from collections.abc import Iterator
from itertools import count


def round_steps(at_least: float) -> Iterator[float]:
    """Yield 1, 2 and 5 times the powers of ten that are at least ``at_least``, the smallest first."""
    for power in count(math.floor(math.log10(at_least))):
        for factor in (1, 2, 5):
            # A division is exact to the last digit where a product with 0.1 is not.
            step = float(factor * 10**power) if power >= 0 else factor / 10**-power
            if step >= at_least:
                yield step


def number(time: float) -> str:
    """Return ``time`` with six significant digits, or with all digits before the point, without an exponent."""
    if abs(time) >= 1e5:
        return f"{time:.0f}"
    text = f"{time:.6g}"
    return text if "e" not in text else f"{time:.12f}".rstrip("0").rstrip(".")


def tick_step(makespan: float, scale: float, letter: float, gap: float) -> float:
    """Return the smallest round step at which the numbers of the ticks fit on an axis from 0 to ``makespan``.

    A time of 1 has the width ``scale``. ``letter`` is the width of a letter, ``gap`` the width between two numbers.
    """
    if not makespan:
        return 1.0
    # A tick needs one letter at least; more than a million ticks are in no drawing.
    smallest = max((letter + gap) / scale, makespan / 1e6)
    last = math.inf
    for step in round_steps(smallest):
        last = step
        ticks = math.ceil(makespan / step)
        # The number before the last may have more digits after the point.
        digits = max(len(number(step * each)) for each in (1, ticks, max(0, ticks - 1)))
        if digits * letter + gap <= step * scale:
            break
    return last

"""One line of the table: who, how much, beside whom, and whether the target is met."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self


@dataclass(frozen=True)
class Verdict:
    """A comparison with another contender, or with an ideal.

    Attributes:
        against: with what.
        ratio: this median over that one.
        target: the most that the ratio may be; ``None`` where nothing is asked.
    """

    against: str
    ratio: float
    target: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the ratio is within the target, where there is one."""
        return None if self.target is None else self.ratio <= self.target


@dataclass(frozen=True)
class Row:
    """What was measured of one contender in one case; ``low`` and ``high`` are quartiles, in ``unit`` too."""

    section: str
    case: str
    family: str
    contender: str
    unit: str
    median: float
    low: float
    high: float
    steps: int
    verdicts: list[Verdict] = field(default_factory=list)
    note: str = ""

    def with_note(self, note: str) -> Self:
        """The same row with a remark."""
        return replace(self, note=note)


def measured_row(
    section: str,
    case: str,
    family: str,
    contender: str,
    unit: str,
    values: Sequence[float],
    verdicts: Sequence[Verdict],
) -> Row:
    """The row of these values, one a step."""
    low, middle, high = quartiles(values)
    return Row(section, case, family, contender, unit, middle, low, high, len(values), list(verdicts))


def median(values: Sequence[float]) -> float:
    """The second quartile."""
    return quartiles(values)[1]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The first, the second (the median) and the third."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high

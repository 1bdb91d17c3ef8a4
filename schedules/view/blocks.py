"""Blocks of a picture: equal parts of the time axis, one below the other, wide enough for the labels of actions."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from nxdpp.schedules.simulate import Span, Timeline
from nxdpp.schedules.view.axis import tick_step
from nxdpp.schedules.view.labels import Labels

# Pixels: of a letter, on both sides of a label, and between the numbers of two ticks.
LETTER = 7.3
_PADDING = 4
_BETWEEN_TICKS = 12
# One block is at most this much wider than its labels need.
_WIDEST = 3
# The share of actions without a label, in a picture that has one block in place of two, and the padding there.
_UNLABELLED = 0.05
_TIGHT_PADDING = 2
# Sums of times such as 0.1 are off in the last digits, by less than this share of a block.
_CLOSE = 1e-6
# Numbers of blocks that are tried.
_MORE_BLOCKS = 4


class BoxPart(NamedTuple):
    """The part of a box in a block: pixels from the left end of the block."""

    block: int
    x: float
    width: float


class Blocks:
    """Blocks that begin at a tick: number, ``time`` of each, pixels of a time of 1, and the longest makespan."""

    def __init__(self, timelines: Mapping[str, Timeline], labels: Labels, width: float) -> None:
        self.longest = max(timeline.makespan for timeline in timelines.values())
        spans = [span for timeline in timelines.values() for rank in timeline.spans for span in rank]
        least, tight = _pixels_per_time(spans, labels)
        if self.longest * min(least, tight) <= width:
            self.time, self.count = self.longest or 1.0, 1
            self.scale = min(width / self.time, _WIDEST * least)
            self._step = tick_step(self.longest, self.scale, LETTER, _BETWEEN_TICKS)
            return
        self._step = tick_step(self.longest, least, LETTER, _BETWEEN_TICKS)
        ticks = math.ceil(self.longest / self._step)
        fewest = math.ceil(ticks / max(1, math.floor(width / least / self._step)))
        # A few more blocks where the last one would be short.
        for count in (*range(fewest, fewest + _MORE_BLOCKS), fewest):
            self.time = math.ceil(ticks / count) * self._step
            self.count = math.ceil(self.longest / self.time - _CLOSE)
            if self.longest - (self.count - 1) * self.time >= self.time / 4:
                break
        self.scale = width / self.time

    def parts(self, start: float, end: float) -> list[BoxPart]:
        """Return the parts of a box from ``start`` to ``end``: one in each block."""
        close = self.time * _CLOSE
        first = min(self.count - 1, int((start + close) / self.time))
        found = []
        for block in range(first, self.count):
            begin = block * self.time
            if block > first and end - begin <= close:
                break
            left, right = max(start, begin), min(end, begin + self.time)
            found.append(BoxPart(block, max(0.0, left - begin) * self.scale, max(0.0, right - left) * self.scale))
        return found

    def ticks(self, block: int) -> list[float]:
        """Return the times of the ticks of ``block``."""
        start, end = block * self.time, min((block + 1) * self.time, self.longest)
        first, last = round(start / self._step), math.floor(end / self._step + _CLOSE)
        return [tick * self._step for tick in range(first, last + 1)]


def _pixels_per_time(spans: list[Span], labels: Labels) -> tuple[float, float]:
    """Return the scales at which labels fit: of actions of at least half the mean length, and of nearly all."""
    lengths = [(span.end - span.start, len(labels.label(span.action))) for span in spans if span.end > span.start]
    if not lengths:
        return 1.0, 1.0
    shortest, mean = min(lengths)[0], sum(length for length, _ in lengths) / len(lengths)
    needed = sorted((LETTER * letters + 2 * _TIGHT_PADDING) / length for length, letters in lengths)
    tight = needed[min(len(needed) - 1, int(len(needed) * (1 - _UNLABELLED)))]
    return (LETTER * labels.widest + 2 * _PADDING) / max(shortest, mean / 2), tight

"""Columns of an SVG picture: its scale, its blocks, and the parts of an action in each. Lengths are pixels."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from nxdpp.schedules.simulate import Span, Timeline
from nxdpp.schedules.view.axis import tick_step
from nxdpp.schedules.view.labels import Labels
from nxdpp.schedules.view.svg_parts import width_of

# Beside the label of a box, and between the numbers of two ticks.
_PADDING = 4
_BETWEEN_TICKS = 12
# One block is at most this much wider than its labels need.
_WIDEST = 3
# The same, and the share of actions without a label, in a picture that has one block in place of two.
_TIGHT_PADDING = 2
_UNLABELLED = 0.05
# Sums of times such as 0.1 are off in the last digits: a block has no hairs of another one's actions, which are this
# part of its time.
_CLOSE = 1e-6
# Numbers of blocks that are tried.
_MORE_BLOCKS = 4


class Part(NamedTuple):
    """The part of an action, or of a row, in a block, from the left end of the rows."""

    block: int
    x: float
    width: float


class Layout:
    """The scale and the blocks.

    Attributes:
        scale: pixels of a time of 1.
        time: of a block.
        blocks: their number.
        step: time between two ticks; a block begins at a tick.
    """

    def __init__(self, timelines: Mapping[str, Timeline], labels: Labels, width: float) -> None:
        self.labels = labels
        self.longest = max(timeline.makespan for timeline in timelines.values())
        spans = [span for timeline in timelines.values() for rank in timeline.spans for span in rank]
        least = _pixels_per_time(spans, labels)
        if self.longest * min(least, _tight_pixels_per_time(spans, labels)) <= width:
            self.scale = min(width / self.longest, _WIDEST * least) if self.longest else 1.0
            self.step = tick_step(self.longest, self.scale, width_of("0"), _BETWEEN_TICKS)
            self.time, self.blocks = self.longest, 1
            return
        self.step = tick_step(self.longest, least, width_of("0"), _BETWEEN_TICKS)
        ticks = math.ceil(self.longest / self.step)
        fewest = math.ceil(ticks / max(1, math.floor(width / least / self.step)))
        # Blocks of equal time, as wide as the picture; a few more where the last one would be short.
        for blocks in (*range(fewest, fewest + _MORE_BLOCKS), fewest):
            self.time = math.ceil(ticks / blocks) * self.step
            self.blocks = math.ceil(self.longest / self.time - 1e-9)
            if self.longest - (self.blocks - 1) * self.time >= self.time / 4:
                break
        self.scale = width / self.time

    def parts(self, start: float, end: float) -> list[Part]:
        """Return the parts of a row from ``start`` to ``end``: one in each block."""
        if self.blocks == 1:
            return [Part(0, start * self.scale, (end - start) * self.scale)]
        close = self.time * _CLOSE
        first = min(self.blocks - 1, int((start + close) / self.time))
        found = []
        for block in range(first, self.blocks):
            begin = block * self.time
            if block > first and end - begin <= close:
                break
            left, right = max(start, begin), min(end, begin + self.time)
            found.append(Part(block, max(0.0, left - begin) * self.scale, max(0.0, right - left) * self.scale))
        return found

    def reaches(self, end: float, block: int) -> bool:
        """Return whether a row to ``end`` has a part in ``block``, or an action without length."""
        return end >= (block - _CLOSE) * self.time

    def label(self, span: Span) -> tuple[str, Part] | None:
        """Return the label of an action and its widest part; ``None`` if the label does not fit."""
        text = self.labels.label(span.action)
        widest = max(self.parts(span.start, span.end), key=lambda part: part.width)
        return (text, widest) if widest.width >= width_of(text) else None

    def ticks(self, block: int) -> list[float]:
        """Return the times of the ticks of a block."""
        start, end = block * self.time, min((block + 1) * self.time, self.longest)
        first, last = round(start / self.step), math.floor(end / self.step + 1e-6)
        return [tick * self.step for tick in range(first, last + 1)]


def _pixels_per_time(spans: list[Span], labels: Labels) -> float:
    """Return the scale at which actions show their labels, but for those shorter than half the mean."""
    lengths = [span.end - span.start for span in spans if span.end > span.start]
    if not lengths:
        return 1.0
    return (width_of("0" * labels.widest) + 2 * _PADDING) / max(min(lengths), sum(lengths) / len(lengths) / 2)


def _tight_pixels_per_time(spans: list[Span], labels: Labels) -> float:
    """Return the scale at which nearly all actions have room for their labels."""
    needed = sorted(
        (width_of(labels.label(span.action)) + 2 * _TIGHT_PADDING) / (span.end - span.start)
        for span in spans
        if span.end > span.start
    )
    return needed[min(len(needed) - 1, int(len(needed) * (1 - _UNLABELLED)))] if needed else 1.0

"""Drawing of a timeline in a terminal: a row per rank, time to the right, in blocks of the terminal's width.

::

    F0 forward  B0 backward  . bubble
    time    |0 |1 |2 |3 |4 |5 |6 |7 |8
    rank 0  F0 F1 .  .  B0--- .  B1---
    rank 1  .  F0 B0--- F1 B1--- .  .
"""

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from rich.console import Console
from rich.text import Text

from nxdpp.schedules.simulate import Timeline
from nxdpp.schedules.view.axis import number, tick_step
from nxdpp.schedules.view.labels import INK, NAMES, Labels, drawn, shade

# The shortest action is as wide as its label. Two limits, in labels: the mean width of an action, and the width of a
# row for each action of all ranks. The second one bounds long transfers.
_MEAN_WIDTH = 4
_BUBBLE_WIDTH = 20


@dataclass(frozen=True)
class _Piece:
    """An action in its columns; a piece of bubble without a label."""

    start: int
    end: int
    label: str = ""
    style: str = "dim"


def draw(timeline: Timeline, width: int, legend: str) -> Text:
    """Return the timeline in lines of at most ``width`` columns; a width under 40 may be passed.

    ``legend`` has the unit of the times in words. A label is whole, or only its letter. Actions without a column are
    counted in the legend. Of gathers, reductions and sums there is what no computation hides.
    """
    timeline = drawn(timeline)
    labels = Labels(timeline.spans)
    scale = (1 + labels.widest) / _unit(timeline)
    drawing = _Drawing(timeline, labels, scale, width)
    text = _joined([*_legend(labels), *drawing.remarks(), Text(legend)], width)
    for block in range(drawing.blocks):
        text.append("\n")
        drawing.append_block(text, block)
    return text


class _Drawing:
    """The rows of a timeline, cut into blocks that begin at a tick of the axis."""

    def __init__(self, timeline: Timeline, labels: Labels, scale: float, width: int) -> None:
        self._scale = scale
        self._cell = cell = 1 + labels.widest
        self._rows = [list(self._pieces(timeline, labels, rank)) for rank in range(len(timeline.spans))]
        self._columns = max(1, self._column(timeline.makespan))
        head = len(f"rank {len(self._rows) - 1}") + 2
        self._heads = [f"rank {rank}".ljust(head) for rank in range(len(self._rows))]
        self._head = "time".ljust(head)
        self._step = tick_step(timeline.makespan, scale, 1, 2)
        # A label may go beyond the end of its block, unless all actions begin in whole cells.
        even = all(piece.start % cell == 0 for row in self._rows for piece in row if piece.label)
        self._ticks = self._ticks_of_a_block(width - head)
        if not even or self._column(self._ticks * self._step) % cell:
            self._ticks = self._ticks_of_a_block(width - head - cell)
        self.blocks = 1
        while self._start(self.blocks) < self._columns:
            self.blocks += 1
        self._drawn = [[piece for piece in row if piece.end > piece.start] for row in self._rows]

    def remarks(self) -> list[Text]:
        """Return the entries of the legend on labels without numbers and on actions without columns."""
        actions = [piece for row in self._rows for piece in row if piece.label]
        found = []
        if any(piece.end - piece.start > len(piece.label) + 1 for piece in actions):
            found.append(Text("- goes on"))
        if any(0 < piece.end - piece.start < len(piece.label) for piece in actions):
            found.append(Text("letter alone: no room for its number"))
        missing = Counter(piece.label[0].upper() for piece in actions if piece.end == piece.start)
        if missing:
            which = ", ".join(f"{count:,} {letter}" for letter, count in missing.items())
            found.append(Text(f"too short to draw: {which}"))
        return found

    def append_block(self, text: Text, block: int) -> None:
        start, end = self._start(block), min(self._start(block + 1), self._columns)
        text.append(self._head)
        text.append(self._axis(block, start, end).rstrip() + "\n")
        for head, row in zip(self._heads, self._drawn, strict=True):
            text.append(head)
            first = bisect_right(row, start, key=attrgetter("end"))
            for piece in row[first : bisect_left(row, end, key=attrgetter("start"))]:
                text.append(self._shown(piece, max(piece.start, start), min(piece.end, end)), piece.style)
            text.append("\n")

    def _axis(self, block: int, start: int, end: int) -> str:
        line = ""
        for tick in range(block * self._ticks, (block + 1) * self._ticks):
            column = self._column(tick * self._step)
            if column >= end and column > start:
                break
            line = line.ljust(column - start) + f"|{number(tick * self._step)}"
        return line

    def _ticks_of_a_block(self, columns: int) -> int:
        return max(1, math.floor(columns / (self._step * self._scale)))

    def _start(self, block: int) -> int:
        """Return the first column of a block."""
        return self._column(block * self._ticks * self._step)

    def _column(self, time: float) -> int:
        # Sums of times such as 0.1 are off in the last digits; round() would send halves up and down.
        return math.floor(time * self._scale + 0.5 + 1e-6)

    def _pieces(self, timeline: Timeline, labels: Labels, rank: int) -> Iterator[_Piece]:
        """Yield the row of a rank, actions and bubble."""
        column = 0
        for span in timeline.spans[rank]:
            start, end = self._column(span.start), self._column(span.end)
            if start > column:
                yield _Piece(column, start)
            colour = shade(span.action.kind, labels.chunk(span.action), labels.chunks)
            yield _Piece(start, end, labels.label(span.action), f"{INK} on {colour}")
            column = end
        yield _Piece(column, max(1, self._column(timeline.makespan)))

    def _shown(self, piece: _Piece, start: int, end: int) -> str:
        """Return the part of ``piece`` from column ``start`` to ``end``."""
        length = end - start
        if not piece.label:
            # One dot a cell, and one at least.
            at = (start - piece.start) % self._cell
            dots = (".".ljust(self._cell) * (1 + (at + length) // self._cell))[at : at + length]
            return dots if "." in dots else ".".ljust(length)
        cut = end < piece.end
        if start > piece.start:
            return "-" * length if cut or length == 1 else "-" * (length - 1) + " "
        label = piece.label if len(piece.label) <= piece.end - piece.start else piece.label[0]
        if len(label) >= length:
            return label
        return label.ljust(length, "-") if cut else label.ljust(length - 1, "-") + " "


def _unit(timeline: Timeline) -> float:
    """Return the time that is as wide as the longest label."""
    lengths = [span.end - span.start for spans in timeline.spans for span in spans]
    shortest = min((length for length in lengths if length > 0), default=1.0)
    return max(shortest, sum(lengths) / len(lengths) / _MEAN_WIDTH, timeline.makespan / len(lengths) / _BUBBLE_WIDTH)


def _legend(labels: Labels) -> list[Text]:
    """Return the entries of the legend: each kind with the labels of its chunks, and the bubble."""
    shown = labels.shown()
    entries = []
    for kind in labels.kinds:
        text = Text()
        for place, chunk in enumerate(shown):
            # A gap in the chunks has dots.
            text.append("" if place == 0 else " " if chunk == shown[place - 1] + 1 else " ... ")
            text.append(labels.of(kind, chunk), f"{INK} on {shade(kind, chunk, labels.chunks)}")
        entries.append(text.append(f" {NAMES[kind]}"))
    entries.append(Text(". bubble"))
    if meaning := labels.legend():
        entries.append(Text(meaning))
    return entries


def _joined(entries: Sequence[Text], width: int) -> Text:
    """Return the entries in lines of at most ``width`` columns; a longer entry is cut between its words."""
    text, line = Text(), 0
    console = Console(width=width)
    for entry in (part for each in entries for part in each.wrap(console, width)):
        if line and line + 2 + len(entry) > width:
            text.append("\n")
            line = 0
        elif line:
            text.append("  ")
            line += 2
        text.append_text(entry)
        line += len(entry)
    return text.append("\n")

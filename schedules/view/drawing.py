"""Drawing of a timeline in a terminal: a row a rank, time to the right, in blocks of the terminal's width.

::

    time 0
    rank 0  F0 F1 .  .  .  .  B0--- B1---
    rank 1  .  F0 B0--- F1 B1--- .  .  .
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from nxdpp.schedules.actions import ActionKind
from nxdpp.schedules.simulate import Span, Timeline
from nxdpp.schedules.view.labels import NAMES, RankLabels, has_chunks, kinds_in

# The shortest action is as wide as its label. Two limits, in labels: the mean width of an action, and the width of a
# row for each action of all ranks. The second one bounds long transfers.
_MEAN_WIDTH = 4
_BUBBLE_WIDTH = 20

# For a rank's only or later stages, and for the first of several.
_STYLES = {
    ActionKind.FORWARD: ("white on blue", "black on bright_blue"),
    ActionKind.BACKWARD: ("white on green", "black on bright_green"),
    ActionKind.INPUT_GRADIENT: ("black on cyan", "black on bright_cyan"),
    ActionKind.WEIGHT_GRADIENT: ("black on yellow", "black on bright_yellow"),
}


@dataclass(frozen=True)
class _Piece:
    """An action in its columns; a piece of bubble without a label."""

    start: int
    end: int
    label: str = ""
    style: str = "dim"


def draw(timeline: Timeline, width: int, like: Timeline | None = None) -> Text:
    """Return the timeline in lines of at most ``width`` columns, or of one action if that is wider.

    A column has the same time as in the drawing of ``like``, a timeline of the same actions, if given.
    """
    cell = 1 + max(
        len(labels.label(span.action))
        for spans, labels in ((spans, RankLabels(spans)) for spans in timeline.spans)
        for span in spans
    )
    scale = cell / _unit(timeline if like is None else like)
    rows = [list(_pieces(spans, scale, round(timeline.makespan * scale))) for spans in timeline.spans]
    columns = max(1, rows[0][-1].end)
    heads = [f"rank {rank:<{len(str(len(rows) - 1))}}  " for rank in range(len(rows))]
    block = max(1, (width - len(heads[0])) // cell) * cell
    text = _legend(timeline)
    for start in range(0, columns, block):
        text.append(f"\ntime {start / scale:.6g}\n")
        for head, row in zip(heads, rows, strict=True):
            text.append(head)
            for piece in row:
                _append(text, piece, max(piece.start, start), min(piece.end, start + block), cell)
            text.append("\n")
    return text


def _unit(timeline: Timeline) -> float:
    """Return the time that is as wide as the longest label."""
    lengths = [span.end - span.start for spans in timeline.spans for span in spans]
    shortest = min((length for length in lengths if length > 0), default=1.0)
    return max(shortest, sum(lengths) / len(lengths) / _MEAN_WIDTH, timeline.makespan / len(lengths) / _BUBBLE_WIDTH)


def _pieces(spans: Sequence[Span], scale: float, columns: int) -> Iterator[_Piece]:
    """Yield the row of a rank, actions and bubble."""
    labels = RankLabels(spans)
    column = 0
    for span in spans:
        start, end = round(span.start * scale), round(span.end * scale)
        if start > column:
            yield _Piece(column, start)
        yield _Piece(
            start, end, labels.label(span.action), _style(span.action.kind, labels.is_first_chunk(span.action))
        )
        column = end
    yield _Piece(column, columns)


def _append(text: Text, piece: _Piece, start: int, end: int, cell: int) -> None:
    """Append the part of ``piece`` from column ``start`` to ``end``."""
    length = end - start
    if length <= 0:
        return
    if not piece.label:
        # One dot a cell.
        shown = "".join("." if column % cell == 0 else " " for column in range(start, end))
    else:
        # A label is shown in full or as its letter: a number without its last digits would be wrong.
        cut = length < piece.end - piece.start
        shown = piece.label if len(piece.label) <= length else "-" * length if cut else piece.label[0]
        shown = shown.ljust(length - 1, "-").ljust(length)
    text.append(shown, piece.style)


def _legend(timeline: Timeline) -> Text:
    text = Text()
    for kind in kinds_in(timeline.spans):
        text.append(f"{kind.value}0", _style(kind, first=False))
        text.append(f" {NAMES[kind]}  ")
    text.append(". bubble", "dim")
    if has_chunks(timeline.spans):
        text.append("  small letters: a rank's first stage")
    text.append("\n")
    return text


def _style(kind: ActionKind, first: bool) -> str:
    return _STYLES[kind][first]

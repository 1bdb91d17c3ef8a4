"""Timelines as an SVG picture, drawn by matplotlib: rows of ranks over a time axis, in blocks of the picture's width.

The picture has its own background and follows the dark mode of its reader. It has a title, a description, and the
times of each action as a tooltip.
"""

import io
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from nxdpp.counted import counted
from nxdpp.schedules.simulate import Span, Timeline
from nxdpp.schedules.view.axis import Axis, number
from nxdpp.schedules.view.blocks import LETTER, Blocks, BoxPart
from nxdpp.schedules.view.labels import NAMES, Labels, shade
from nxdpp.schedules.view.svg_style import FONT, styled

# Pixels: of a line, between the frame and the content, of a row and the gap below it, of the axis.
_LINE, _INDENT, _ROW, _GAP, _AXIS = 20, 12, 24, 4, 30
# From the right end to the ends of the bubbles' figures, and to the rows.
_PEAK, _FIGURES = 52, 120
_MARKS = {"wait": "wait for another rank", "send": "start of a send or receive"}

# Start and end of waits or sends, for each rank.
Intervals = Sequence[Sequence[tuple[float, float]]]


def svg(
    title: str,
    timelines: Mapping[str, Timeline],
    axis: Axis,
    width: int,
    marks: Mapping[str, Mapping[str, Intervals]] | None = None,
) -> str:
    """Return the text of an SVG file: in each block the timelines one above the other, over one axis.

    ``timelines`` are of the same stages, by name; the name of a single one may be empty. ``width`` is in pixels, at
    least 480. ``marks`` has by name of the timeline its intervals of ``wait`` and of ``send``.
    """
    from matplotlib import rc_context

    title = "".join(letter if letter.isprintable() else "?" for letter in title)
    settings: dict[Any, Any] = {"font.family": "DejaVu Sans Mono", "font.size": FONT, "text.parse_math": False}
    with rc_context(settings | {"svg.fonttype": "none", "svg.hashsalt": "nxdpp"}):
        picture = _Picture(timelines, axis, width, marks or {})
        return styled(picture.drawn(title), title, picture.description())


class _Picture:
    """A figure whose page has its origin at the upper left, in pixels, and grows downwards to ``_bottom``."""

    def __init__(
        self, timelines: Mapping[str, Timeline], axis: Axis, width: int, marks: Mapping[str, Mapping[str, Intervals]]
    ) -> None:
        self._timelines, self._axis, self._width, self._marks = timelines, axis, width, marks
        self._labels = Labels([spans for timeline in timelines.values() for spans in timeline.spans])
        self._ranks = max(len(timeline.spans) for timeline in timelines.values())
        self._left = 2 * _INDENT + LETTER * max(len(axis.unit), len(f"rank {self._ranks - 1}"))
        self._right = width - _INDENT
        self._blocks = Blocks(timelines, self._labels, self._right - _FIGURES - self._left)
        from matplotlib.figure import Figure

        # A figure has 72 dots an inch: its points are pixels.
        self._figure = Figure(dpi=72, frameon=False)
        self._page = self._figure.add_axes((0, 0, 1, 1))
        self._page.set_axis_off()
        self._bottom = float(_INDENT)
        # The upper edge of the first rank's row, by block and timeline.
        self._tops: dict[tuple[int, str], float] = {}

    def drawn(self, title: str) -> str:
        """Return the picture as matplotlib writes it."""
        from matplotlib.patches import FancyBboxPatch

        self._add_head(title)
        self._add_legend()
        for block in range(self._blocks.count):
            self._add_block(block)
        self._add_actions()
        width, height = self._width, round(self._bottom + _INDENT)
        frame = FancyBboxPatch(
            (6.5, 6.5), width - 13, height - 13, boxstyle="round,pad=6", fc="none", gid="page|", zorder=0, clip_on=False
        )
        self._page.add_artist(frame)
        self._page.set(xlim=(0, width), ylim=(height, 0))
        self._figure.set_size_inches(width / 72, height / 72)
        written = io.StringIO()
        self._figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
        return written.getvalue()

    def description(self) -> str:
        """Return the content in words."""
        kinds = ", ".join(f"{kind.value} {NAMES[kind]}" for kind in self._labels.kinds)
        rows = f"A row for each of {counted(self._ranks, 'rank')}, time to the right"
        return f"{'; '.join(self._figures())}. {rows}. {kinds}. {self._axis.legend}."

    def _figures(self) -> list[str]:
        """Return a line of figures for each timeline."""
        return [
            f"{name + ': ' if name else ''}makespan {number(round(timeline.makespan, 6))}{self._axis.suffix}, "
            f"bubble {100 * timeline.mean_bubble:.1f} % on average"
            for name, timeline in self._timelines.items()
        ]

    def _text(self, x: float, text: str, y: float | None = None, **more: Any) -> None:
        """Add a text to the line or row whose upper edge is at ``y``."""
        self._page.text(x, (self._bottom if y is None else y) + 16, text, **more)

    def _box(self, kind: str, x: float, y: float, width: float, height: float, tooltip: str = "") -> None:
        """Add a box of a ``kind``; of an action it is the colour."""
        from matplotlib.patches import Rectangle

        colour, group = (kind, "action") if kind.startswith("#") else ("none", kind)
        self._page.add_artist(
            Rectangle((x, y), width, height, facecolor=colour, gid=f"{group}|{tooltip}", clip_on=False)
        )

    def _add_head(self, title: str) -> None:
        for text, weight in ((title, "bold"), *((figures, "normal") for figures in self._figures())):
            for line in textwrap.wrap(text, max(1, int((self._right - _INDENT) / LETTER))):
                self._text(_INDENT, line, weight=weight)
                self._bottom += _LINE
        self._bottom += _GAP

    def _add_legend(self) -> None:
        x = float(_INDENT)
        for boxes, name in self._entries():
            widths = [max(14.0, LETTER * len(label) + 8) for _, label in boxes]
            whole = sum(widths) + (6 if widths else 0) + LETTER * len(name)
            if x > _INDENT and x + whole > self._right:
                x, self._bottom = float(_INDENT), self._bottom + _LINE + _GAP
            for (kind, label), width in zip(boxes, widths, strict=True):
                self._box(kind, x, self._bottom, width, _LINE)
                self._text(x + width / 2, label, self._bottom - 2, ha="center", gid="label|")
                x += width
            x += 6 if widths else 0
            self._text(x, name, self._bottom - 2)
            x += LETTER * len(name) + 18
        self._bottom += _LINE + 3 * _GAP

    def _entries(self) -> Iterator[tuple[list[tuple[str, str]], str]]:
        """Yield the entries of the legend: kinds and labels of boxes, and a text."""
        for kind in self._labels.kinds:
            shown = self._labels.shown()
            yield [(shade(kind, each, self._labels.chunks), self._labels.of(kind, each)) for each in shown], NAMES[kind]
        yield [("row", "")], "bubble"
        marked = {kind for marks in self._marks.values() for kind, ranks in marks.items() if any(ranks)}
        yield from (([(kind, "")], name) for kind, name in _MARKS.items() if kind in marked)
        spans = (span for timeline in self._timelines.values() for rank in timeline.spans for span in rank)
        small = "small boxes have no label" if any(self._label(span) is None for span in spans) else None
        yield from (([], text) for text in (self._labels.legend(), self._axis.legend, small) if text)

    def _add_block(self, block: int) -> None:
        """Add names, rows and the axis of a block."""
        for name, timeline in self._timelines.items():
            reached = [part for part in self._blocks.parts(0.0, timeline.makespan) if part.block == block]
            if block and not reached:
                continue
            if name or not block:
                self._text(self._left, name)
                if not block:
                    self._add_figures("bubble", "peak")
                self._bottom += _LINE
            self._tops[block, name] = self._bottom
            for rank in range(len(timeline.spans)):
                self._text(_INDENT, f"rank {rank}")
                for part in reached:
                    self._box("row", self._left + part.x, self._bottom, part.width, _ROW)
                if not block:
                    self._add_figures(f"{100 * timeline.bubbles[rank]:.1f} %", f"{timeline.peaks[rank]:.4g}")
                self._bottom += _ROW + _GAP
        self._text(_INDENT, self._axis.unit, self._bottom + 2)
        self._add_axis(block)
        self._bottom += _AXIS

    def _add_figures(self, bubble: str, peak: str) -> None:
        self._text(self._right - _PEAK, bubble, ha="right")
        self._text(self._right, peak, ha="right")

    def _add_axis(self, block: int) -> None:
        """Add the line, the ticks and their numbers below a block."""
        start = block * self._blocks.time
        length = min(self._blocks.time, self._blocks.longest - start)
        self._box("axis", self._left, self._bottom, length * self._blocks.scale, 0)
        for tick in self._blocks.ticks(block):
            x = self._left + (tick - start) * self._blocks.scale
            self._box("axis", x, self._bottom, 0, 5)
            self._text(x, number(tick), self._bottom + 2, ha="center", gid="axis|")

    def _add_actions(self) -> None:
        """Add waits as thin bars and sends as narrow ones, and over them the actions with labels and tooltips.

        Actions of one colour follow each other.
        """
        actions: list[tuple[str, float, float, float, str]] = []
        for name, timeline in self._timelines.items():
            marks = self._marks.get(name, {})
            for rank, spans in enumerate(timeline.spans):
                for mark, (start, end) in ((kind, each) for kind in marks for each in marks[kind][rank]):
                    for part, x, top in self._placed(name, rank, start, end):
                        # A send is at least a pixel wide.
                        bar = (x, top + 9, part.width, 6) if mark == "wait" else (x, top + 12, max(1.0, part.width), 12)
                        self._box(mark, *bar)
                for span in spans:
                    colour = shade(span.action.kind, self._labels.chunk(span.action), self._labels.chunks)
                    tooltip, label = f"{span.action}, {number(span.start)} to {number(span.end)}", self._label(span)
                    for part, x, top in self._placed(name, rank, span.start, span.end):
                        actions.append((colour, x, top, part.width, tooltip))
                        if part == label:
                            text = self._labels.label(span.action)
                            self._text(x + part.width / 2, text, top, ha="center", gid="label|")
        for colour, x, top, width, tooltip in sorted(actions, key=itemgetter(0)):
            self._box(colour, x, top, width, _ROW, tooltip)

    def _placed(self, name: str, rank: int, start: float, end: float) -> Iterator[tuple[BoxPart, float, float]]:
        """Yield the parts of a box in a row, with their left and upper edges."""
        for part in self._blocks.parts(start, end):
            yield part, self._left + part.x, self._tops[part.block, name] + rank * (_ROW + _GAP)

    def _label(self, span: Span) -> BoxPart | None:
        """Return the widest part of an action; ``None`` if its label does not fit there."""
        widest = max(self._blocks.parts(span.start, span.end), key=lambda part: part.width)
        return widest if widest.width >= LETTER * len(self._labels.label(span.action)) else None

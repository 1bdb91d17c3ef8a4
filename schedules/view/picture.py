"""Timelines as an SVG picture: rows of ranks over a time axis, in blocks of the picture's width.

The picture has its own background and follows the dark mode of its reader. It has a title, a description, and the
times of each action as a tooltip.
"""

from collections.abc import Iterator, Mapping, Sequence

from nxdpp.schedules.actions import ActionKind
from nxdpp.schedules.simulate import Timeline
from nxdpp.schedules.view.axis import Axis, number
from nxdpp.schedules.view.labels import NAMES, Labels
from nxdpp.schedules.view.picture_layout import Layout
from nxdpp.schedules.view.svg_parts import LINE, box, class_of, clean, lines_of, path, style, text_at, width_of

# Pixels: between the frame and the content, of a row and the gap below it, of the axis with its numbers.
_INDENT, _ROW, _GAP, _AXIS = 12, 24, 4, 30
# From the top of a row or line to the line of its letters.
_BASE = 16
_BUBBLE, _PEAK = 68, 52
# Height of a wait, and width of a send at least.
_WAIT, _SEND = 6, 1.0

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

    Args:
        title: first line of the picture.
        timelines: of the same stages, by name; the name of a single one may be empty.
        axis: unit of time.
        width: pixels of the picture, at least 480.
        marks: by name of the timeline, its intervals of ``wait`` and of ``send``.
    """
    return _Picture(title, timelines, axis, width, marks or {}).text()


class _Picture:
    def __init__(
        self,
        title: str,
        timelines: Mapping[str, Timeline],
        axis: Axis,
        width: int,
        marks: Mapping[str, Mapping[str, Intervals]],
    ) -> None:
        self._marks = marks
        self._title, self._timelines, self._axis, self._width = title, timelines, axis, width
        ranks = [spans for timeline in timelines.values() for spans in timeline.spans]
        self._labels = Labels(ranks)
        heads = (axis.unit, f"rank {max(len(timeline.spans) for timeline in timelines.values()) - 1}")
        self._left = _INDENT + max(map(width_of, heads)) + 12
        self._right = width - _INDENT
        self._layout = Layout(timelines, self._labels, self._right - _BUBBLE - _PEAK - self._left)
        self._parts: list[str] = []
        # The upper edge of the first rank's row, by block and timeline.
        self._tops: dict[tuple[int, str], float] = {}
        self._bottom = float(_INDENT)

    def text(self) -> str:
        """Return the text of the file."""
        self._add_head()
        self._add_legend()
        for block in range(self._layout.blocks):
            self._add_block(block)
        for name, marks in self._marks.items():
            for kind, intervals in marks.items():
                self._add_marks(name, kind, intervals)
        self._parts += self._actions()
        width, height = self._width, round(self._bottom + _INDENT)
        size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
                f"<title>{clean(self._title)}</title>",
                f"<desc>{clean(self._description())}</desc>",
                style(self._labels.kinds, self._labels.chunks),
                f'<rect class="page" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="6"/>',
                *self._parts,
                "</svg>",
                "",
            ]
        )

    def _figures(self) -> list[str]:
        """Return a line of figures for each timeline."""
        return [
            f"{name + ': ' if name else ''}makespan {number(round(timeline.makespan, 6))}{self._axis.suffix}, "
            f"bubble {100 * timeline.mean_bubble:.1f} % on average"
            for name, timeline in self._timelines.items()
        ]

    def _description(self) -> str:
        ranks = max(len(timeline.spans) for timeline in self._timelines.values())
        kinds = ", ".join(f"{kind.value} {NAMES[kind]}" for kind in self._labels.kinds)
        figures = "; ".join(self._figures())
        return f"{figures}. A row for each of {ranks} ranks, time to the right. {kinds}. {self._axis.legend}."

    def _add_head(self) -> None:
        for kind, text in (("title", self._title), *(("", figures) for figures in self._figures())):
            for line in lines_of(text, self._right - _INDENT):
                self._parts.append(text_at(_INDENT, self._bottom + _BASE, line, kind))
                self._bottom += LINE
        self._bottom += _GAP

    def _add_legend(self) -> None:
        x = float(_INDENT)
        entries = [(self._swatches(kind), NAMES[kind]) for kind in self._labels.kinds]
        texts = [self._axis.legend]
        if meaning := self._labels.legend():
            texts.insert(0, meaning)
        spans = (span for timeline in self._timelines.values() for rank in timeline.spans for span in rank)
        if any(self._layout.label(span) is None for span in spans):
            texts.append("small boxes have no label")
        entries.append(([("row", "")], "bubble"))
        kinds = {kind for marks in self._marks.values() for kind, found in marks.items() if any(found)}
        entries += [([(kind, "")], _MARKS[kind]) for kind in _MARKS if kind in kinds]
        for swatches, name in [*entries, *(([], text) for text in texts)]:
            widths = [max(14.0, width_of(label) + 8) for _, label in swatches]
            whole = sum(widths) + (6 if widths else 0) + width_of(name)
            if x > _INDENT and x + whole > self._right:
                x, self._bottom = float(_INDENT), self._bottom + LINE + _GAP
            for (of_kind, label), width in zip(swatches, widths, strict=True):
                shown = box(of_kind, x, self._bottom, width, LINE)
                if label:
                    shown += text_at(x + width / 2, self._bottom + _BASE - 2, label)
                    shown = f'<g class="action">{shown}</g>'
                self._parts.append(shown)
                x += width
            x += 6 if widths else 0
            self._parts.append(text_at(x, self._bottom + _BASE - 2, name))
            x += width_of(name) + 18
        self._bottom += LINE + 3 * _GAP

    def _swatches(self, kind: ActionKind) -> list[tuple[str, str]]:
        return [(class_of(kind, chunk), self._labels.of(kind, chunk)) for chunk in self._labels.shown()]

    def _add_block(self, block: int) -> None:
        """Add names, rows and axis of a block."""
        end = self._bottom
        for name, timeline in self._timelines.items():
            if block and not self._layout.reaches(timeline.makespan, block):
                continue
            if name or not block:
                self._add_names(name, first=block == 0)
            self._tops[block, name] = self._bottom
            for rank in range(len(timeline.spans)):
                self._add_row(block, timeline, rank)
            end = self._bottom
        self._add_axis(block, end)

    def _add_names(self, name: str, *, first: bool) -> None:
        """Add the line above the rows of a timeline, with the names of the figures in the first block."""
        self._parts.append(text_at(self._left, self._bottom + _BASE, name))
        if first:
            self._parts.append(text_at(self._right - _PEAK, self._bottom + _BASE, "bubble", "end"))
            self._parts.append(text_at(self._right, self._bottom + _BASE, "peak", "end"))
        self._bottom += LINE

    def _add_row(self, block: int, timeline: Timeline, rank: int) -> None:
        """Add the name, the background and the figures of a rank."""
        line = self._bottom + _BASE
        self._parts.append(text_at(_INDENT, line, f"rank {rank}"))
        for part in self._layout.parts(0.0, timeline.makespan):
            if part.block == block:
                self._parts.append(box("row", self._left + part.x, self._bottom, part.width, _ROW))
        if block == 0:
            self._parts.append(text_at(self._right - _PEAK, line, f"{100 * timeline.bubbles[rank]:.1f} %", "end"))
            self._parts.append(text_at(self._right, line, f"{timeline.peaks[rank]:.4g}", "end"))
        self._bottom += _ROW + _GAP

    def _add_axis(self, block: int, top: float) -> None:
        """Add the line, the ticks and their numbers below a block."""
        start = block * self._layout.time
        end = min(start + self._layout.time, self._layout.longest)
        strokes = f"M{self._left:.2f} {top:.2f}h{(end - start) * self._layout.scale:.2f}"
        for time in self._layout.ticks(block):
            x = self._left + (time - start) * self._layout.scale
            strokes += f"M{x:.2f} {top:.2f}v5"
            self._parts.append(text_at(x, top + 18, number(time), "middle"))
        self._parts.append(path("axis", strokes))
        self._parts.append(text_at(_INDENT, top + 18, self._axis.unit))
        self._bottom = top + _AXIS

    def _add_marks(self, name: str, kind: str, intervals: Intervals) -> None:
        """Add waits as thin bars and sends as narrow ones; actions are drawn over them."""
        for rank, each in enumerate(intervals):
            for part in (part for start, end in each for part in self._layout.parts(start, end)):
                top = self._tops[part.block, name] + rank * (_ROW + _GAP)
                x = self._left + part.x
                if kind == "wait":
                    self._parts.append(box(kind, x, top + (_ROW - _WAIT) / 2, part.width, _WAIT))
                else:
                    self._parts.append(box(kind, x, top + _ROW / 2, max(_SEND, part.width), _ROW / 2))

    def _actions(self) -> Iterator[str]:
        """Yield one element for each action: its tooltip, a box in each of its blocks, its label."""
        for name, timeline in self._timelines.items():
            for rank, spans in enumerate(timeline.spans):
                below = rank * (_ROW + _GAP)
                for span in spans:
                    kind = class_of(span.action.kind, self._labels.chunk(span.action))
                    shown = f"<title>{span.action}, {number(span.start)} to {number(span.end)}</title>"
                    for part in self._layout.parts(span.start, span.end):
                        shown += box(kind, self._left + part.x, self._tops[part.block, name] + below, part.width, _ROW)
                    if found := self._layout.label(span):
                        label, part = found
                        line = self._tops[part.block, name] + below + _BASE
                        shown += text_at(self._left + part.x + part.width / 2, line, label)
                    yield f'<g class="action">{shown}</g>'

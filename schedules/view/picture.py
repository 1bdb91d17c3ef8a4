"""Timelines as an SVG picture: a row a rank, time to the right, then the rank's bubble and peak.

The picture has its own background and follows the dark mode of the browser.
"""

from collections.abc import Mapping
from html import escape

from nxdpp.schedules.actions import ActionKind
from nxdpp.schedules.simulate import Span, Timeline
from nxdpp.schedules.view.labels import NAMES, RankLabels, has_chunks, kinds_in

# Pixels.
_ROW, _GAP, _LEFT, _RIGHT, _FONT = 24, 4, 70, 150, 11
_LEGEND, _TITLE, _SUMMARY = 40, 28, 30
_TEXT_WIDTH = 7
# A wider picture is scaled down, and leaves out labels.
_WIDEST = 20_000

# For a rank's only or later stages, and for the first of several.
_CLASSES = {
    ActionKind.FORWARD: ("f", "f1"),
    ActionKind.BACKWARD: ("b", "b1"),
    ActionKind.INPUT_GRADIENT: ("i", "i1"),
    ActionKind.WEIGHT_GRADIENT: ("w", "w1"),
}
_STYLE = """<style>
.page { fill: #ffffff; stroke: #d0d7de } .row { fill: #eaeef2 } text { fill: #1f2328 }
.f { fill: #6f9ceb } .b { fill: #5cb870 } .i { fill: #45b8b8 } .w { fill: #e3b341 }
.f1 { fill: #bcd3fa } .b1 { fill: #b4e3be } .i1 { fill: #aee6e6 } .w1 { fill: #f7e3a8 }
.action { stroke: #ffffff; stroke-width: 0.5 } .label { fill: #1f2328; text-anchor: middle }
@media (prefers-color-scheme: dark) {
.page { fill: #0d1117; stroke: #3d444d } .row { fill: #21262d } text { fill: #e6edf3 }
.action { stroke: #0d1117 }
}
</style>"""


def svg(timelines: Mapping[str, Timeline]) -> str:
    """The text of an SVG file: each timeline below its title, all in one scale."""
    ranks = [spans for timeline in timelines.values() for spans in timeline.spans]
    longest = max(timeline.makespan for timeline in timelines.values())
    scale = _pixels_per_time(ranks, longest)
    width = max(_LEFT + round(longest * scale) + _RIGHT, max(map(len, timelines)) * _TEXT_WIDTH, 720)
    top = _LEGEND
    parts = _legend(ranks)
    for title, timeline in timelines.items():
        parts.append(_text(8, top + 14, title))
        top += _TITLE
        for rank in range(len(timeline.spans)):
            parts += _row(timeline, rank, scale, top)
            top += _ROW + _GAP
        summary = f"makespan {timeline.makespan:.6g}, bubble {100 * timeline.mean_bubble:.1f} % on average"
        parts.append(_text(8, top + 14, summary))
        top += _SUMMARY
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}" viewBox="0 0 {width} {top}" '
        f'font-family="sans-serif" font-size="{_FONT}">'
    )
    page = f'<rect class="page" x="0.5" y="0.5" width="{width - 1}" height="{top - 1}" rx="6"/>'
    return "\n".join([head, _STYLE, page, *parts, "</svg>", ""])


def _pixels_per_time(ranks: list[list[Span]], makespan: float) -> float:
    """The scale at which actions show their labels, but for those shorter than half the mean."""
    lengths = [span.end - span.start for spans in ranks for span in spans if span.end > span.start]
    if not lengths:
        return 1.0
    longest_label = max(len(RankLabels(spans).label(spans[-1].action)) for spans in ranks)
    shown = max(min(lengths), sum(lengths) / len(lengths) / 2)
    return min((longest_label * _TEXT_WIDTH + 6) / shown, _WIDEST / makespan)


def _row(timeline: Timeline, rank: int, scale: float, top: int) -> list[str]:
    spans = timeline.spans[rank]
    labels = RankLabels(spans)
    end = _LEFT + timeline.makespan * scale
    figures = f"bubble {100 * timeline.bubbles[rank]:.1f} %, peak {timeline.peaks[rank]:g}"
    parts = [
        _text(8, top + 16, f"rank {rank}"),
        f'<rect class="row" x="{_LEFT}" y="{top}" width="{end - _LEFT:.2f}" height="{_ROW}"/>',
        _text(end + 8, top + 16, figures),
    ]
    for span in spans:
        start, width = _LEFT + span.start * scale, (span.end - span.start) * scale
        label = labels.label(span.action)
        kind = _CLASSES[span.action.kind][labels.is_first_chunk(span.action)]
        parts.append(
            f'<rect class="action {kind}" x="{start:.2f}" y="{top}" width="{width:.2f}" height="{_ROW}">'
            f"<title>{span.action}, {span.start:.6g} to {span.end:.6g}</title></rect>"
        )
        if width >= len(label) * _TEXT_WIDTH:
            parts.append(_text(start + width / 2, top + 16, label, "label"))
    return parts


def _legend(ranks: list[list[Span]]) -> list[str]:
    entries = [(_CLASSES[kind][0], f"{kind.value} {NAMES[kind]}") for kind in kinds_in(ranks)]
    parts = []
    for column, (kind, text) in enumerate([*entries, ("row", "bubble")]):
        parts.append(f'<rect class="{kind}" x="{8 + 130 * column}" y="12" width="14" height="14"/>')
        parts.append(_text(26 + 130 * column, 23, text))
    if has_chunks(ranks):
        parts.append(_text(96 + 130 * len(entries), 23, "lighter, small letters: a rank's first stage"))
    return parts


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    attribute = f' class="{kind}"' if kind else ""
    return f'<text{attribute} x="{x:.2f}" y="{y}">{escape(text)}</text>'

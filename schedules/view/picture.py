"""A timeline as an SVG picture: a row a rank, time to the right, then the rank's bubble share and peak."""

from html import escape

from nxdpp.schedules.actions import ActionKind
from nxdpp.schedules.simulate import Timeline
from nxdpp.schedules.view.labels import NAMES, RankLabels, has_chunks, kinds_in

# Pixels.
_ROW, _GAP, _LEFT, _RIGHT, _TOP, _FONT = 24, 4, 70, 150, 64, 11
_TEXT_WIDTH = 7
# No picture is wider, if its labels have to be left out.
_WIDEST = 20_000

# For a rank's only or later stages, and for the first of several.
_FILLS = {
    ActionKind.FORWARD: ("#4a7dd6", "#a9c6f5"),
    ActionKind.BACKWARD: ("#3d9a50", "#a8dcb2"),
    ActionKind.INPUT_GRADIENT: ("#2fa6a6", "#a5e0e0"),
    ActionKind.WEIGHT_GRADIENT: ("#d9a520", "#f5dd98"),
}


def svg(timeline: Timeline, title: str) -> str:
    """The picture, as the text of an SVG file."""
    scale = _pixels_per_time(timeline)
    width = max(_LEFT + round(timeline.makespan * scale) + _RIGHT, len(title) * _TEXT_WIDTH, 720)
    height = _TOP + len(timeline.spans) * (_ROW + _GAP) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="{_FONT}">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(8, 18, title),
        *_legend(timeline),
    ]
    for rank in range(len(timeline.spans)):
        parts += _row(timeline, rank, scale)
    below = _TOP + len(timeline.spans) * (_ROW + _GAP) + 16
    summary = f"makespan {timeline.makespan:.6g}, bubble {100 * timeline.mean_bubble:.1f} % on average"
    return "\n".join([*parts, _text(8, below, summary), "</svg>", ""])


def _pixels_per_time(timeline: Timeline) -> float:
    """As many as let the shortest action show its label."""
    shortest = min((s.end - s.start for spans in timeline.spans for s in spans if s.end > s.start), default=1.0)
    longest_label = max(len(RankLabels(spans).label(spans[-1].action)) for spans in timeline.spans)
    wanted = (longest_label * _TEXT_WIDTH + 6) / shortest
    return min(wanted, _WIDEST / timeline.makespan) if timeline.makespan else wanted


def _row(timeline: Timeline, rank: int, scale: float) -> list[str]:
    spans = timeline.spans[rank]
    labels = RankLabels(spans)
    top = _TOP + rank * (_ROW + _GAP)
    length = timeline.makespan * scale
    parts = [
        _text(8, top + 16, f"rank {rank}"),
        f'<rect x="{_LEFT}" y="{top}" width="{length:.2f}" height="{_ROW}" fill="#eeeeee"/>',
        _text(
            _LEFT + length + 8, top + 16, f"bubble {100 * timeline.bubbles[rank]:.1f} %, peak {timeline.peaks[rank]:g}"
        ),
    ]
    for span in spans:
        start, long = _LEFT + span.start * scale, (span.end - span.start) * scale
        label = labels.label(span.action)
        fill = _FILLS[span.action.kind][labels.is_first_chunk(span.action)]
        parts.append(
            f'<rect x="{start:.2f}" y="{top}" width="{long:.2f}" height="{_ROW}" fill="{fill}" stroke="white">'
            f"<title>{span.action}, {span.start:.6g} to {span.end:.6g}</title></rect>"
        )
        if long >= len(label) * _TEXT_WIDTH:
            parts.append(_text(start + long / 2, top + 16, label, anchor="middle"))
    return parts


def _legend(timeline: Timeline) -> list[str]:
    parts = []
    x = 8
    for kind in kinds_in(timeline.spans):
        parts.append(f'<rect x="{x}" y="30" width="14" height="14" fill="{_FILLS[kind][0]}"/>')
        parts.append(_text(x + 18, 41, f"{kind.value} {NAMES[kind]}"))
        x += 130
    parts.append(f'<rect x="{x}" y="30" width="14" height="14" fill="#eeeeee"/>')
    parts.append(_text(x + 18, 41, "bubble"))
    if has_chunks(timeline.spans):
        parts.append(_text(x + 70, 41, "lighter, small letters: a rank's first stage"))
    return parts


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.2f}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'

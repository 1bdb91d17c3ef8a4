"""Timeline as an SVG picture, drawn by matplotlib: a row per rank, time to the right, in blocks of one width."""

import io
import math
import re
import textwrap
from pathlib import Path
from typing import Any

from nxdpp.schedules.simulate import Timeline
from nxdpp.schedules.view.axis import number
from nxdpp.schedules.view.labels import INK, NAMES, Labels, drawn, shade

# Inches: of the picture, its left and right margin, its head, a row, the space between two blocks, and a letter.
_WIDTH, _LEFT, _RIGHT, _HEAD, _ROW, _GAP, _LETTER = 10.0, 0.7, 1.3, 1.2, 0.25, 0.45, 0.085
_BLOCK = _WIDTH - _LEFT - _RIGHT
# Texts stay texts, in one size that has the width of a letter.
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "nxdpp",
    "text.parse_math": False,
    "font.family": "monospace",
    "font.monospace": ["DejaVu Sans Mono", "monospace"],
    "font.size": 9,
}
_FONT = "font-size: 9px; font-family: 'DejaVu Sans Mono', monospace"


def write_picture(title: str, timeline: Timeline, legend: str, file: Path) -> None:
    """Draw ``timeline`` into the SVG file ``file``; ``legend`` has the unit of its times in words.

    Raises ``ImportError`` without matplotlib, and ``OSError`` for a file that cannot be written.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    timeline = drawn(timeline)
    labels = Labels(timeline.spans)
    ranks = len(timeline.spans)
    lengths = [span.end - span.start for spans in timeline.spans for span in spans]
    makespan = timeline.makespan or 1.0
    # Labels fit into actions of at least half the mean length, but for transfers that are much longer.
    shortest = max(min(lengths), sum(lengths) / len(lengths) / 2) or 1.0
    across = min(makespan / shortest, 9 * max(map(len, timeline.spans)))
    blocks = math.ceil(across * labels.widest * _LETTER / _BLOCK)
    time = makespan / blocks
    height = _HEAD + blocks * (ranks * _ROW + _GAP)
    title = "".join(letter if letter.isprintable() else "?" for letter in title)
    with rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, height))
        rows = figure.subplots(blocks, squeeze=False)[:, 0]
        sides = {"left": _LEFT / _WIDTH, "right": 1 - _RIGHT / _WIDTH, "bottom": _GAP / height}
        figure.subplots_adjust(**sides, top=1 - _HEAD / height, hspace=_GAP / (ranks * _ROW))
        for block, axes in enumerate(rows):
            begin, end = block * time, (block + 1) * time
            axes.set(xlim=(begin, end), ylim=(ranks - 0.5, -0.5))
            axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
            axes.tick_params(left=False)
            for rank, spans in enumerate(timeline.spans):
                parts = [
                    (max(s.start, begin), min(s.end, end), s.action) for s in spans if s.start < end and s.end > begin
                ]
                colours = [shade(action.kind, labels.chunk(action), labels.chunks) for *_, action in parts]
                boxes = [(first, last - first) for first, last, _ in parts]
                axes.broken_barh(
                    boxes, (rank - 0.45, 0.9), facecolors=colours, edgecolors="white", linewidth=0.5, clip_on=False
                )
                for first, last, action in parts:
                    if (last - first) / time * _BLOCK >= len(labels.label(action)) * _LETTER:
                        axes.text((first + last) / 2, rank, labels.label(action), color=INK, ha="center", va="center")
        for rank, (bubble, peak) in enumerate(zip(timeline.bubbles, timeline.peaks, strict=True)):
            beside = {"transform": rows[0].get_yaxis_transform(), "va": "center"}
            rows[0].text(1.01, rank, f"{100 * bubble:5.1f} % {peak:6.4g}", **beside)
        rows[0].text(1.01, 1.02, " bubble   peak", transform=rows[0].transAxes)
        rows[-1].set_xlabel("; ".join(filter(None, (legend, labels.legend()))))
        said = f"makespan {number(round(timeline.makespan, 6))}, bubble {100 * timeline.mean_bubble:.1f} % on average"
        figure.text(0.01, 1 - 0.1 / height, f"{textwrap.fill(title, 105)}\n{said}", va="top")
        entries = [
            Patch(color=shade(kind, chunk, labels.chunks), label=f"{labels.of(kind, chunk)} {NAMES[kind]}")
            for kind in labels.kinds
            for chunk in labels.shown()
        ]
        figure.legend(handles=entries, loc="upper left", bbox_to_anchor=(0, 1 - 0.45 / height), frameon=False, ncols=4)
        made = io.StringIO()
        figure.savefig(
            made, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None, "Title": title}
        )
    file.write_text(_shortened(made.getvalue()))


def _shortened(svg: str) -> str:
    """Return ``svg`` without indents and turns by nothing; its texts have the font from the whole."""
    svg = svg.replace(f"{_FONT}; ", "").replace(f' style="{_FONT}"', "").replace("<svg ", f'<svg style="{_FONT}" ', 1)
    return re.sub(r' transform="rotate\(-0 [^"]*"|(?<=\n) +', "", svg)

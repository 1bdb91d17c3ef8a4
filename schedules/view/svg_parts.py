"""Parts of an SVG picture: texts, boxes, the style for light and dark readers. Lengths are pixels."""

import textwrap
from collections.abc import Sequence
from html import escape

from nxdpp.schedules.actions import ActionKind
from nxdpp.schedules.view.colours import INK, shade

FONT = 12
# The width of a letter in the fonts of the style, rounded up; the height of a line.
LETTER = 7.3
LINE = 20
_FONTS = "ui-monospace, 'SFMono-Regular', Menlo, Consolas, 'DejaVu Sans Mono', 'Liberation Mono', monospace"

# Text, page, its frame, rows and lines of the axis.
LIGHT = {"text": "#1f2328", "page": "#ffffff", "frame": "#d0d7de", "row": "#e6eaef", "line": "#8c959f"}
DARK = {"text": "#e6edf3", "page": "#0d1117", "frame": "#3d444d", "row": "#262c36", "line": "#656c76"}


def style(kinds: Sequence[ActionKind], chunks: int) -> str:
    """Return the style sheet, with a class for each kind and chunk."""
    shades = [
        f".{class_of(kind, chunk)} {{ fill: {shade(kind, chunk, chunks)} }}"
        for kind in kinds
        for chunk in range(chunks)
    ]
    lines = [
        "<style>",
        f"text {{ font: {FONT}px {_FONTS}; white-space: pre }}",
        ".title { font-weight: bold } .middle { text-anchor: middle } .end { text-anchor: end }",
        *_scheme(LIGHT),
        "@media (prefers-color-scheme: dark) {",
        *_scheme(DARK),
        "}",
        # The colours of actions are the same for all readers.
        f".action text {{ fill: {INK}; text-anchor: middle }}",
        *shades,
        "</style>",
    ]
    return "\n".join(lines)


def _scheme(colours: dict[str, str]) -> list[str]:
    return [
        f"text {{ fill: {colours['text']} }} .page {{ fill: {colours['page']}; stroke: {colours['frame']} }}",
        f".row {{ fill: {colours['row']} }} .axis {{ stroke: {colours['line']}; fill: none }}",
        f".wait {{ fill: {colours['line']} }} .send {{ fill: {colours['text']} }}",
        f".action rect {{ stroke: {colours['page']} }}",
    ]


def class_of(kind: ActionKind, chunk: int) -> str:
    """Return the class of the boxes of a kind and chunk."""
    return f"{kind.value.lower()}{chunk}"


def width_of(text: str) -> float:
    """Return the width of a text."""
    return len(text) * LETTER


def lines_of(text: str, width: float) -> list[str]:
    """Return the lines of a text that is ``width`` wide at most."""
    return textwrap.wrap(text, max(1, int(width / LETTER)))


def clean(text: str) -> str:
    """Return the text for XML, which has no control characters and no lone surrogates."""
    return escape("".join(letter if letter.isprintable() else "?" for letter in text))


def text_at(x: float, y: float, text: str, kind: str = "") -> str:
    """Return a text whose line of letters is at ``y``."""
    attribute = f' class="{kind}"' if kind else ""
    return f'<text{attribute} x="{_short(x)}" y="{_short(y)}">{clean(text)}</text>'


def box(kind: str, x: float, y: float, width: float, height: float) -> str:
    """Return a box; without a class for an empty ``kind``."""
    attribute = f' class="{kind}"' if kind else ""
    sizes = f'x="{_short(x)}" y="{_short(y)}" width="{_short(width)}" height="{_short(height)}"'
    return f"<rect{attribute} {sizes}/>"


def path(kind: str, strokes: str) -> str:
    """Return lines along a path."""
    return f'<path class="{kind}" d="{strokes}"/>'


def _short(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")

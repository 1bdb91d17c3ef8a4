"""Style of an SVG picture that matplotlib has written: colours for light and dark readers, tooltips, and less text."""

import re
from collections.abc import Iterator
from html import escape
from itertools import groupby
from typing import NamedTuple
from xml.etree import ElementTree

from nxdpp.schedules.view.labels import INK

FONT = 12
_FONTS = "ui-monospace, Menlo, Consolas, monospace"

# Text, page, its frame, rows and lines of the axis.
LIGHT = {"text": "#1f2328", "page": "#ffffff", "frame": "#d0d7de", "row": "#e6eaef", "line": "#8c959f"}
DARK = {"text": "#e6edf3", "page": "#0d1117", "frame": "#3d444d", "row": "#262c36", "line": "#656c76"}

# Of an inline style, what differs between texts of a class.
_KEPT = re.compile(r"(text-anchor): (end)|(font-weight): (700)")
_FILL = re.compile(r"fill: (#(?!000000)\w+)")
# The corners of a rectangle.
_RECTANGLE = re.compile(r"M(\S+) (\S+)L(\S+) \2L\3 (\S+)L\1 \4(?:L\1 \2)?z")
_SVG = "{http://www.w3.org/2000/svg}"


class _Element(NamedTuple):
    """A path or text: its class and colour, the data of the path or the attributes of the text, and a text."""

    tag: str
    kind: str
    fill: str
    drawn: str
    text: str


def styled(written: str, title: str, description: str) -> str:
    """Return a picture of matplotlib with a style sheet in place of its inline styles.

    A group with the ``gid`` ``kind|tooltip`` becomes one of the class ``kind``. Coordinates have one digit after the
    point, and paths without a tooltip are joined.
    """
    body = "\n".join(_group(list(run)) for _, run in groupby(_elements(written), lambda each: each[:3]))
    size = re.search(r'viewBox="0 0 (\S+) (\S+)"', written)
    assert size is not None, "a picture has a size"
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" role="img" \
width="{size[1]}" height="{size[2]}" viewBox="0 0 {size[1]} {size[2]}">
<title>{escape(title)}</title>
<desc>{escape(description)}</desc>
<style>
text {{ font-size: {FONT}px; font-family: {_FONTS}; white-space: pre }}
{_scheme(LIGHT)}
@media (prefers-color-scheme: dark) {{
{_scheme(DARK)}
}}
.axis text, .label text {{ text-anchor: middle; stroke: none }}
.label text {{ fill: {INK}; pointer-events: none }}
</style>
{body}
</svg>
"""


def _elements(written: str) -> Iterator[_Element]:
    """Yield the paths and texts of a picture of matplotlib."""
    for group in ElementTree.fromstring(written).iter(f"{_SVG}g"):
        name, mark, tooltip = group.get("id", "").partition("|")
        kind = name if mark else ""
        for path in group.findall(f"{_SVG}path"):
            fill = _FILL.search(path.get("style", ""))
            yield _Element("path", kind, fill[1] if fill else "", _shortened(path.get("d", "")), tooltip)
        for text in group.findall(f"{_SVG}text"):
            more = "".join(f' {key}="{value}"' for key, value in _pairs(text.get("style", "")))
            x, y = (_short(float(text.get(side, "0"))) for side in "xy")
            yield _Element("text", kind, "", f'x="{x}" y="{y}"{more}', text.text or "")


def _group(run: list[_Element]) -> str:
    """Return elements of one class and colour as a group, or texts without a class one by one."""
    tag, kind, fill, _, text = run[0]
    if tag == "text":
        lines = [f"<text {each.drawn}>{escape(each.text, quote=False)}</text>" for each in run]
    elif text:
        lines = [f'<path d="{each.drawn}"><title>{escape(each.text)}</title></path>' for each in run]
    else:
        lines = [f'<path d="{"".join(each.drawn for each in run)}"/>']
    colour = f' fill="{fill}"' if fill else ""
    return "\n".join([f'<g class="{kind}"{colour}>', *lines, "</g>"] if kind else lines)


def _shortened(data: str) -> str:
    """Return the data of a path with one digit after the point; a rectangle has the lengths of its edges."""
    data = re.sub(r"\s*([MLQz])\s*", r"\1", data)
    found = _RECTANGLE.fullmatch(data)
    if found is None:
        return re.sub(r"[\d.]+", lambda each: _short(float(each[0])), data)
    left, top, right, bottom = map(float, found.groups())
    corner, across, down = f"M{_short(left)} {_short(top)}", _short(right - left), _short(bottom - top)
    if across == "0" or down == "0":
        return corner + (f"h{across}" if down == "0" else f"v{down}")
    return f"{corner}v{down}h{across}v-{down}z"


def _short(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


def _pairs(style: str) -> list[tuple[str, str]]:
    """Return names and values of the styles that differ between texts."""
    return [(found[1] or found[3], found[2] or found[4]) for found in _KEPT.finditer(style)]


def _scheme(colours: dict[str, str]) -> str:
    return (
        f"text, .send {{ fill: {colours['text']} }} .page {{ fill: {colours['page']}; stroke: {colours['frame']} }}\n"
        f".row {{ fill: {colours['row']} }} .wait {{ fill: {colours['line']} }} .axis {{ stroke: {colours['line']} }}\n"
        f".action {{ stroke: {colours['page']} }}"
    )

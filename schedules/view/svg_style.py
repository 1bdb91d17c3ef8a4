"""Style of an SVG picture that matplotlib has written: colours for light and dark readers, tooltips, and less text."""

import re
from html import escape
from itertools import groupby

from nxdpp.schedules.view.labels import INK

FONT = 12
_FONTS = "ui-monospace, 'SFMono-Regular', Menlo, Consolas, 'DejaVu Sans Mono', 'Liberation Mono', monospace"

# Text, page, its frame, rows and lines of the axis.
LIGHT = {"text": "#1f2328", "page": "#ffffff", "frame": "#d0d7de", "row": "#e6eaef", "line": "#8c959f"}
DARK = {"text": "#e6edf3", "page": "#0d1117", "frame": "#3d444d", "row": "#262c36", "line": "#656c76"}

# Of an inline style, what differs between elements of a class.
_KEPT = re.compile(r"(fill): (#(?!000000)\w+)|(text-anchor): (end)|(font-weight): (700)")

# The five corners of a rectangle, and a group of a class with one element.
_RECTANGLE = re.compile(r"M(\S+) (\S+)L(\S+) \2L\3 (\S+)L\1 \4(?:L\1 \2)?z")
_GROUP = re.compile(r'<g class="(\w+)">(<title>[^<]*</title>)?\n<(path|text) ([^<>]*?)/?>(?:([^<\n]*)</text>)?\n</g>')
# A group that says nothing, around elements or groups of one level.
_PLAIN = re.compile(r"<g>\n((?:(?!<g[ >])(?!</g>).*\n)*)</g>\n")
_MARKED = re.compile(r"\[(\w+)\]")


def styled(written: str, title: str, description: str) -> str:
    """Return a picture of matplotlib with a style sheet in place of its inline styles.

    A group with the ``gid`` ``kind|tooltip`` becomes one of the class ``kind``.
    """
    body = written[written.index("<g id=") :]
    body = re.sub(r'<g id="(\w+)\|([^"]*)">', r'<g class="\1"><title>\2</title>', body).replace("<title></title>", "")
    body = re.sub(r' style="([^"]*)"', lambda style: "".join(map(_attribute, _KEPT.findall(style[1]))), body)
    # Turns by nothing, names that nothing refers to, and spaces.
    body = re.sub(
        r' transform="rotate\(-0 [^"]*"| id="(figure|axes|patch|text|line2d|xtick|matplotlib)[^"]*"', "", body
    )
    body = re.sub(r"\s*([MLQz])\s+(?=[^<>]*>)", r"\1", body)
    body = re.sub(r"<g>\s*(<text[^<]*</text>)\s*</g>", r"\1", re.sub(r">\s+<", ">\n<", body))
    body = _joined(re.sub(r"(\d\.\d\d)\d+(?=[^<>]*>)", r"\1", _RECTANGLE.sub(r"M\1 \2H\3V\4H\1z", body)))
    size = re.search(r'viewBox="0 0 (\S+) (\S+)"', written)
    assert size is not None, "a picture has a size"
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" role="img" \
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
{body}"""


def _joined(body: str) -> str:
    """Return the picture with one group around neighbours of one class, and none without a class."""
    body = _GROUP.sub(_line, body)
    while (inner := _PLAIN.sub(r"\1", body)) != body:
        body = inner
    lines = body.split("\n")
    joined: list[str] = []
    for name, run in groupby(lines, lambda line: (_MARKED.match(line) or ("", ""))[1]):
        elements = [_MARKED.sub("", line) for line in run]
        joined += [f'<g class="{name}">', *elements, "</g>"] if name else elements
    return "\n".join(joined)


def _line(group: re.Match[str]) -> str:
    """Return a line ``[class]<path ...>`` for a group with one path or text."""
    name, tooltip, tag, attributes, text = group.groups(default="")
    content = tooltip + text
    return f"[{name}]<{tag} {attributes}" + (f">{content}</{tag}>" if content else "/>")


def _scheme(colours: dict[str, str]) -> str:
    return (
        f"text, .send {{ fill: {colours['text']} }} .page {{ fill: {colours['page']}; stroke: {colours['frame']} }}\n"
        f".row {{ fill: {colours['row']} }} .wait {{ fill: {colours['line']} }} .axis {{ stroke: {colours['line']} }}\n"
        f".action {{ stroke: {colours['page']} }}"
    )


def _attribute(found: tuple[str, ...]) -> str:
    name, value = filter(None, found)
    return f' {name}="{value}"'

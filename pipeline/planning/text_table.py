"""Plain tables of text: columns as wide as their longest cell, nothing truncated or wrapped.

A terminal, a pipe and a file get the same lines.
"""

import textwrap
from collections.abc import Sequence

WIDTH = 80
_PREFIXES = ("", "Ki", "Mi", "Gi", "Ti", "Pi")
_KIBI = 1024


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, total: bool = False) -> list[str]:
    """Return the lines of a table.

    Two spaces are between columns, or one where the table is wider than 80 columns with two.

    Args:
        heads: names of the columns.
        rows: cells, one for each column.
        left: number of columns aligned to the left; others are aligned to the right.
        total: separate the last row by a line.
    """
    cells = [list(heads), *map(list, rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heads))]
    room = WIDTH - sum(widths)
    gap = "  " if 2 * (len(widths) - 1) <= room else " "
    if gap == " " and len(widths) <= room:
        widths[0] += 1
    lines = [
        gap.join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    rule = "-" * max(map(len, lines))
    body = lines[1:]
    if total:
        body = [*body[:-1], rule, body[-1]]
    return [lines[0], rule, *body]


def paragraph(text: str) -> str:
    """Return ``text`` in lines of at most 80 columns; later lines are indented. Long words stay whole."""
    return textwrap.fill(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def bytes_text(size: float) -> str:
    """Return ``size`` with four digits and a binary unit: ``45.48 GiB``."""
    prefix = 0
    while size >= _KIBI - 0.5 and prefix < len(_PREFIXES) - 1:
        size /= _KIBI
        prefix += 1
    return f"{size:.0f} B" if not prefix else f"{four_digits(size)} {_PREFIXES[prefix]}B"


def four_digits(value: float) -> str:
    """Return ``value``, at least 0 and below 10,000, with four digits: ``1.094``, ``176.0``, ``1023``."""
    for decimals, limit in ((3, 9.9995), (2, 99.995), (1, 999.95)):
        if value < limit:
            return f"{value:.{decimals}f}"
    return f"{value:.0f}"

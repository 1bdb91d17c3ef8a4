"""Tables of figures that fit into the terminal: no number is cut or broken."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

# Columns of the terminal beside the text of a cell: with a frame, and without.
_FRAMED, _BARE = 3, 2


def figures_tables(
    columns: Sequence[str], rows: Sequence[Sequence[str]], width: int, caption: str | None = None
) -> "list[Table]":
    """Return a table aligned to the right, or several where one is wider than ``width`` columns.

    Each of several begins with the first column. A narrow table has no frame. Headings and lists are broken between
    words, numbers are not.
    """
    cells = [[name, *(row[at] for row in rows)] for at, name in enumerate(columns)]
    least = [max(len(part) for cell in each for part in _parts(cell)) for each in cells]
    # The text of a cell without breaks.
    most = [max(map(len, each)) for each in cells]
    framed = sum(least) + _FRAMED * len(least) + 1 <= width
    groups = [list(range(len(columns)))] if framed else _groups(least, width)
    return [
        _table(
            [columns[at] for at in group],
            [[row[at] for at in group] for row in rows],
            _widened([least[at] for at in group], [most[at] for at in group], width, framed=framed),
            caption if group is groups[-1] else None,
            framed=framed,
        )
        for group in groups
    ]


def _groups(widths: Sequence[int], width: int) -> list[list[int]]:
    """Divide the columns, each group with the first one."""
    groups = [[0]]
    for at in range(1, len(widths)):
        if len(groups[-1]) > 1 and sum(widths[each] + _BARE for each in (*groups[-1], at)) > width:
            groups.append([0])
        groups[-1].append(at)
    return groups


def _widened(least: Sequence[int], most: Sequence[int], width: int, *, framed: bool) -> list[int]:
    """Return widths of columns from ``least`` to ``most``, the first columns wider before the others."""
    spare = width - sum(least) - (_FRAMED * len(least) + 1 if framed else _BARE * len(least))
    widths = []
    for low, high in zip(least, most, strict=True):
        more = max(0, min(spare, high - low))
        widths.append(low + more)
        spare -= more
    return widths


def _parts(cell: str) -> list[str]:
    """Return the parts between which a cell may be broken: words and numbers, but not ``12.5 %``."""
    return [cell] if cell.endswith("%") else cell.split()


def _table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[int], caption: str | None, *, framed: bool
) -> "Table":
    from rich.table import Table

    table = Table(caption=caption)
    if not framed:
        table.box = None
    for name, width in zip(columns, widths, strict=True):
        table.add_column(name, justify="right", overflow="fold", width=width)
    for row in rows:
        table.add_row(*row)
    return table

"""Tables that fit into the terminal: a line under the heads, spaces between columns, no figure cut or broken."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import JustifyMethod
    from rich.table import Table

# Dashes below the heads and above the total.
_LINES = "    \n    \n ---\n    \n ---\n    \n    \n    \n"
# A cell may be broken here, but not in brackets.
_COMMA = re.compile(r", (?![^\[]*\])")
# The fewest columns of a text that is folded.
NARROWEST = 20


def tables(
    heads: Sequence[str], rows: Sequence[Sequence[str]], width: int, *, left: int = 1, folded: int | None = None
) -> "list[Table]":
    """Return a table, or several where one is wider than ``width`` columns: each begins with the first column.

    Heads are broken between words, and cells after a comma. The first ``left`` columns are aligned to the left, the
    others to the right. The texts of the column ``folded`` may be broken between any words, and in words that are too
    long.
    """
    from rich.box import Box
    from rich.cells import cell_len
    from rich.table import Table

    columns = [[head, *(row[at] for row in rows)] for at, head in enumerate(heads)]
    most = [max(map(cell_len, column)) for column in columns]
    parts = [[*column[0].split(), *(part for cell in column[1:] for part in _COMMA.split(cell))] for column in columns]
    # With a comma behind all parts but the last one.
    least = [min(high, max(map(cell_len, each), default=0) + 1) for high, each in zip(most, parts, strict=True)]
    if folded is not None:
        least[folded] = min(least[folded], NARROWEST)
    whole = sum(least[at] if at == folded else high for at, high in enumerate(most))
    gap = 1 if whole + 2 * (len(most) - 1) > width >= sum(least) + len(least) - 1 else 2
    found = []
    for group in _groups(least, width, gap):
        spare = width + gap - sum(least[at] + gap for at in group)
        table = Table(box=Box(_LINES), show_edge=False, pad_edge=False, padding=(0, gap - 1, 0, 0))
        for at in group:
            more = max(0, min(spare, most[at] - least[at]))
            spare -= more
            justify: JustifyMethod = "left" if at < left or at == folded else "right"
            table.add_column(heads[at], justify=justify, overflow="fold", width=least[at] + more)
        for row in rows:
            table.add_row(*(row[at] for at in group))
        found.append(table)
    return found


def _groups(widths: Sequence[int], width: int, gap: int) -> list[list[int]]:
    """Divide the columns into groups of at most ``width`` columns of the terminal, each with the first one."""
    groups = [[0]]
    for at in range(1, len(widths)):
        if len(groups[-1]) > 1 and sum(widths[each] + gap for each in (*groups[-1], at)) - gap > width:
            groups.append([0])
        groups[-1].append(at)
    return groups

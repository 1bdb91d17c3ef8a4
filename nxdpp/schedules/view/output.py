"""Console and numbers that the commands share."""

import argparse
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

# Columns of an output that is no terminal.
COLUMNS = 80
# Forwards of a simulation above which a line tells the size.
_TOLD = 2**15


def whole_number(text: str) -> int:
    """Return the number of a flag; ``ArgumentTypeError`` for one that is not whole, and for one below 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def tell_size(size: int, made_by: str, most: int) -> None:
    """Tell the size of a long simulation on stderr; ``ValueError`` for one of more than ``most`` forwards.

    ``made_by`` is the subject of the message, such as ``"8 ranks and 32 microbatches make"``.
    """
    if size > most:
        raise ValueError(
            f"{made_by} {size:,} forwards to simulate, and the limit is {most:,}. A schedule repeats itself: give "
            f"fewer microbatches or fewer ranks."
        )
    if size > _TOLD:
        print(f"simulating {size:,} forwards and their backwards ...", file=sys.stderr, flush=True)


def console(columns: int | None) -> "Console":
    """Return the console, ``columns`` wide or as wide as the terminal."""
    from rich.console import Console

    if columns is None and not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        columns = COLUMNS
    return Console(width=columns, highlight=False, markup=False)

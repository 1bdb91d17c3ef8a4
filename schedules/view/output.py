"""Console, files and flags that the commands share."""

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nxdpp.schedules.simulate import Timeline
from nxdpp.schedules.view.axis import Axis

if TYPE_CHECKING:
    from rich.console import Console

    from nxdpp.schedules.view.picture import Intervals

# Columns of an output that is no terminal; the fewest of a drawing; pixels of a picture, and the fewest.
_COLUMNS = 80
_FEWEST_COLUMNS = 40
_PIXELS = 960
_FEWEST_PIXELS = 480
# Forwards of a simulation above which a line tells the size.
_TOLD = 2**15


def add_flags(parser: argparse.ArgumentParser, drawn: str) -> None:
    """Add ``--width``, ``--svg`` and ``--svg-width``; ``drawn`` is the content of the picture."""
    parser.add_argument(
        "--width",
        type=int,
        metavar="N",
        help=f"columns of drawings and tables, {_FEWEST_COLUMNS} at least (those of the terminal; {_COLUMNS} for a "
        f"file or pipe)",
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help=f"also draw {drawn} into this SVG file")
    parser.add_argument(
        "--svg-width",
        type=int,
        metavar="PIXELS",
        help=f"width of the SVG picture, {_FEWEST_PIXELS} at least ({_PIXELS})",
    )


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


def check_flags(options: argparse.Namespace) -> None:
    """Raise ``ValueError`` for a width that is too small or has no effect."""
    if options.width is not None and options.width < _FEWEST_COLUMNS:
        raise ValueError(f"--width {options.width} must be {_FEWEST_COLUMNS} or more.")
    if options.svg_width is not None and options.svg is None:
        raise ValueError("--svg-width is the width of an SVG picture: add --svg FILE, or leave out --svg-width.")
    if options.svg_width is not None and options.svg_width < _FEWEST_PIXELS:
        raise ValueError(f"--svg-width {options.svg_width} must be {_FEWEST_PIXELS} or more.")


def write_svg(
    options: argparse.Namespace,
    title: str,
    timelines: Mapping[str, Timeline],
    axis: Axis,
    marks: "Mapping[str, Mapping[str, Intervals]] | None" = None,
) -> None:
    """Draw the timelines, by name, into the file of ``--svg``, if given, with their waits and sends.

    Raises ``ValueError`` for a path that cannot be written, and without matplotlib.
    """
    if options.svg is None:
        return
    from nxdpp.schedules.view.picture import svg

    try:
        picture = svg(title, timelines, axis, options.svg_width or _PIXELS, marks)
    except ImportError:
        raise ValueError(
            "--svg draws with matplotlib, which is not installed: pip install 'nxdpp[pictures]'."
        ) from None
    try:
        options.svg.write_text(picture, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--svg: {options.svg} cannot be written: {error.strerror}") from None


def console(columns: int | None) -> "Console":
    """Return the console, ``columns`` wide or as wide as the terminal."""
    from rich.console import Console

    if columns is None and not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        columns = _COLUMNS
    return Console(width=columns, highlight=False, markup=False)

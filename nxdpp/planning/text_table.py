"""Tables and paragraphs as the planner prints them, and sizes and rates as text: ``80GB``, ``400Gb/s``."""

import re
import textwrap
from collections.abc import Mapping, Sequence

from nxdpp.schedules.view.output import console
from nxdpp.schedules.view.tables import tables

WIDTH = 80
_PREFIXES = ("", "Ki", "Mi", "Gi", "Ti", "Pi")
_KIBI = 1024


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Return the lines of ``tables`` of 80 columns: the same in a terminal, a pipe and a file."""
    out = console(WIDTH)
    with out.capture() as captured:
        out.print(*tables(heads, rows, out.width, left=left), sep="\n")
    return [line.rstrip() for line in captured.get().splitlines()]


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


_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
# Bytes of each unit. A capital B is a byte, a small b a bit.
_SIZES = {
    f"{prefix}{unit}": factor / (8 if unit == "b" else 1)
    for prefix, factor in {**_DECIMAL, **_BINARY}.items()
    for unit in ("B", "b")
}
_RATES = {f"{unit}/s": size for unit, size in _SIZES.items()}
_FLOPS = {f"{prefix}FLOP/s": float(factor) for prefix, factor in _DECIMAL.items()}
_TEXT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z/]+)\s*")
_OF_BYTES = (
    "give a number and one of B, kB, MB, GB, TB, KiB, MiB, GiB, TiB, or of bits b, kb, Mb, Gb, Tb{}. A capital B is a "
    "byte, a small b a bit."
)


def size_of(value: str | float, name: str) -> int:
    """Return the bytes that ``value`` names: ``"80GB"`` is 80e9, ``"75GiB"`` is 75 * 2**30, a number is of bytes.

    ``name`` is the argument's, for messages. Raises ``ValueError`` for any other text, and for 0 or less.
    """
    return round(_parsed(value, name, _SIZES, _OF_BYTES.format(", as in 80GB or 75GiB")))


def rate_of(value: str | float, name: str) -> float:
    """Return the bytes a second that ``value`` names: ``"50GB/s"``, ``"400Gb/s"`` (bits), or a number.

    Raises ``ValueError`` as ``size_of`` does.
    """
    return _parsed(value, name, _RATES, _OF_BYTES.format(", and end it with /s, as in 50GB/s or 400Gb/s"))


def flops_of(value: str | float, name: str) -> float:
    """Return the FLOPs a second that ``value`` names: ``"989TFLOP/s"``, or a number. Raises ``ValueError`` likewise."""
    return _parsed(value, name, _FLOPS, "give FLOPs a second as in 989TFLOP/s or 2.25PFLOP/s.")


def _parsed(value: str | float, name: str, units: Mapping[str, float], remedy: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        found = float(value)
    else:
        match = _TEXT.fullmatch(str(value))
        if match is None or match[2] not in units:
            raise ValueError(f"{name}={value!r} is not understood: {remedy}")
        found = float(match[1]) * units[match[2]]
    if not 0 < found < float("inf"):
        raise ValueError(f"{name}={value!r} must be above 0 and finite.")
    return found

"""Rows of the memory table: one rank, or the worst of several, with its limits."""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from benchmarks.report import markdown_table

MEGABYTE = 10**6
"""The unit of limits and tables."""

OWN_FACTOR = 1.10
OWN_SLACK = 100 * MEGABYTE
"""A rank's peak may be 1.10 times its own parameters and buffers, and 100 MB."""

COLUMNS = ("way", "rank", "owned MB", "peak MB", "limit MB", "imports MB", "seconds", "limit s", "targets")
_LEFT = ("way", "rank", "targets")


@dataclass(frozen=True)
class Row:
    """One rank, or the worst of several; bytes are what comes on top of ``import torch, transformers``.

    ``owned``: bytes of its parameters and buffers. ``imported``: bytes of the code imported after the two. ``peak``:
    the highest of the runs. ``seconds``: of each run. A limit is ``None`` without a target.
    """

    case: str
    way: str
    ranks: str
    owned: int
    imported: int
    peak: int
    peak_limit: int | None
    seconds: list[float]
    seconds_limit: float | None = None

    @property
    def met(self) -> bool | None:
        """True if the row is within all its limits; ``None`` without any."""
        verdicts = []
        if self.peak_limit is not None:
            verdicts.append(self.peak <= self.peak_limit)
        if self.seconds_limit is not None:
            verdicts.append(max(self.seconds) <= self.seconds_limit)
        return all(verdicts) if verdicts else None

    def cells(self) -> list[str]:
        """The texts of the row in the table."""
        longest = f" (to {max(self.seconds):.2f})" if len(self.seconds) > 1 else ""
        return [
            self.way,
            self.ranks,
            _megabytes(self.owned),
            _megabytes(self.peak),
            "" if self.peak_limit is None else _megabytes(self.peak_limit),
            _megabytes(self.imported),
            f"{statistics.median(self.seconds):.2f}{longest}",
            "" if self.seconds_limit is None else f"{self.seconds_limit:g}",
            {True: "met", False: "NOT met", None: "no target"}[self.met],
        ]


def own_limit(owned: int) -> int:
    """Bytes that a rank with ``owned`` bytes of parameters and buffers may hold at its peak."""
    return int(OWN_FACTOR * owned) + OWN_SLACK


def rows_as_markdown(rows: Sequence[Row], session: Mapping[str, Any]) -> str:
    """A line about the session, a table for each case, and the number of targets met."""
    parts = [
        "Commit {commit}; {processor}, {cores} cores, {memory_gb} GB, load {load_before} before; Python {python}, "
        "torch {torch}, transformers {transformers}; {runs} runs of each rank, 1 of the 405B model; highest peak, "
        "median seconds (to the longest).".format(**session)
    ]
    for case, group in groupby(rows, key=lambda row: row.case):
        parts.append(f"**{case}**\n\n{markdown_table(COLUMNS, [row.cells() for row in group], _LEFT)}")
    targets = [row.met for row in rows if row.met is not None]
    parts.append(f"{sum(targets)} of {len(targets)} targets are met.")
    return "\n\n".join(parts)


def rows_as_json(rows: Iterable[Row], session: Mapping[str, Any]) -> str:
    """``{"session": …, "rows": […]}``; bytes, seconds, and whether limits are met."""
    listed = [asdict(row) | {"met": row.met} for row in rows]
    return json.dumps({"session": dict(session), "rows": listed}, indent=1) + "\n"


def _megabytes(size: int) -> str:
    return f"{size / MEGABYTE:,.0f}"

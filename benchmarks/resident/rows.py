"""What one measurement says, and whether it is within its limits."""

import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

MEGABYTE = 10**6
"""The unit of limits and tables: a million bytes."""

OWN_FACTOR = 1.10
OWN_SLACK = 100 * MEGABYTE
"""A rank may hold 1.10 times its own parameters and buffers, and 100 MB."""


@dataclass(frozen=True)
class Row:
    """One rank, or the worst of several; bytes are above those of ``import torch, transformers``.

    ``owned`` are bytes of its parameters and buffers, ``imported`` those of the code that was imported after the two,
    ``peak`` the highest of the runs, ``seconds`` those of each run. A limit is ``None`` where there is no target.
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
    def median_seconds(self) -> float:
        """Of the runs, which other work on the machine may make longer."""
        return statistics.median(self.seconds)

    @property
    def met(self) -> bool | None:
        """Whether it is within all its limits; ``None`` without any."""
        verdicts = []
        if self.peak_limit is not None:
            verdicts.append(self.peak <= self.peak_limit)
        if self.seconds_limit is not None:
            verdicts.append(max(self.seconds) <= self.seconds_limit)
        return all(verdicts) if verdicts else None


def own_limit(owned: int) -> int:
    """Bytes that a rank with ``owned`` bytes of parameters and buffers may hold at its peak."""
    return int(OWN_FACTOR * owned) + OWN_SLACK


def rows_as_json(rows: Iterable[Row], session: Mapping[str, Any]) -> str:
    """``{"session": …, "rows": […]}``; bytes, seconds, and whether limits are met."""
    listed = [asdict(row) | {"median_seconds": row.median_seconds, "met": row.met} for row in rows]
    return json.dumps({"session": dict(session), "rows": listed}, indent=1) + "\n"

"""The rows: ranks of one pipeline, and each rank of the 405B Llama in a process of its own."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.resident.processes import run_alone, run_ranks
from benchmarks.resident.published import LLAMA_3_1_405B_STAGES, SIZES, WITH_TARGETS
from benchmarks.resident.rows import MEGABYTE, Row, own_limit
from benchmarks.resident.ways import WAYS
from benchmarks.resident.weights import bytes_of, write_weights

RANKS = 4
WRAP_BYTES = 1500 * MEGABYTE
WRAP_SECONDS = 20.0
_WRAPS = ((1, "even"), (2, "even"), (1, "balanced"), (2, "balanced"))

Say = Callable[[str], None]


def rows_of_ranks(size: str, ways: Sequence[str], runs: int, say: Say) -> list[Row]:
    """A row for each way and rank of a pipeline of 4."""
    rows = []
    with _weights(size, any(WAYS[name].reads_weights for name in ways), say) as folder:
        for name in ways:
            say(WAYS[name].title)
            repeated = [
                run_ranks(RANKS, "benchmarks.resident.rank_program", name, size, str(folder)) for _ in range(runs)
            ]
            for rank in range(RANKS):
                measured = [ranks[rank] for ranks in repeated]
                has_target = WAYS[name].has_target and size in WITH_TARGETS
                limit = own_limit(measured[0]["owned"]) if has_target else None
                case = f"Llama of {_parameters(size)} parameters, {RANKS} ranks"
                rows.append(_row(case, WAYS[name].title, str(rank), measured, limit))
    return rows


def rows_of_wraps(ranks: Sequence[int], say: Say) -> list[Row]:
    """A row for each way to cut the 405B Llama: the worst of ``ranks``, each run once, and all of their seconds."""
    rows = []
    for chunks, partition in _WRAPS:
        way = f"{partition}, {chunks} stage{'s' if chunks > 1 else ''} a rank"
        say(f"Llama-3.1-405B, {way}")
        measured = [run_alone("benchmarks.resident.wrap_program", str(rank), str(chunks), partition) for rank in ranks]
        case = f"Llama-3.1-405B, {LLAMA_3_1_405B_STAGES} ranks"
        which = f"worst of {len(ranks)}"
        rows.append(_row(case, way, which, measured, WRAP_BYTES, WRAP_SECONDS))
    return rows


def _row(
    case: str,
    way: str,
    ranks: str,
    measured: Sequence[dict[str, Any]],
    peak_limit: int | None,
    seconds_limit: float | None = None,
) -> Row:
    return Row(
        case,
        way,
        ranks,
        owned=max(run["owned"] for run in measured),
        imported=max(run["imported"] for run in measured),
        peak=max(run["peak"] for run in measured),
        peak_limit=peak_limit,
        seconds=[run["seconds"] for run in measured],
        seconds_limit=seconds_limit,
    )


@contextmanager
def _weights(size: str, are_read: bool, say: Say) -> Iterator[Path | str]:
    if not are_read:
        yield "-"
        return
    with tempfile.TemporaryDirectory(prefix="nxdpp-weights-") as folder:
        say(f"writing weights to {folder}")
        write_weights(SIZES[size](), Path(folder))
        yield folder


def _parameters(size: str) -> str:
    return f"{bytes_of(SIZES[size]()) / 4e9:.2f} B"

"""Measured processes: the ranks of one pipeline, and each rank of Llama-3.1-405B by itself."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from benchmarks.resident.rows import MEGABYTE, Row, own_limit
from benchmarks.resident.ways import SIZES, WAYS, WITH_TARGETS, WRAP_RANKS

RANKS = 4
WRAP_BYTES = 1500 * MEGABYTE
WRAP_SECONDS = 20.0
_WRAPS = ((1, "even"), (2, "even"), (1, "balanced"), (2, "balanced"))
_ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT = 900


def rows_of_ranks(size: str, ways: Sequence[str], runs: int) -> list[Row]:
    """A row for each way and rank of a pipeline of 4."""
    rows = []
    with _weights(size, any(WAYS[name].reads_weights for name in ways)) as folder:
        for name in ways:
            way = WAYS[name]
            print(f"measuring {way.title}", file=sys.stderr)
            repeated = [run_program(RANKS, "rank", name, size, folder) for _ in range(runs)]
            for rank in range(RANKS):
                measured = [ranks[rank] for ranks in repeated]
                has_target = way.has_target and size in WITH_TARGETS
                limit = own_limit(measured[0]["owned"]) if has_target else None
                case = f"Llama of {_billions(size):.2f} B parameters, {RANKS} ranks"
                rows.append(_row(case, way.title, str(rank), measured, limit))
    return rows


def rows_of_wraps(ranks: Sequence[int]) -> list[Row]:
    """A row for each cut of the 405B Llama: the worst of ``ranks``, each run once, with the seconds of all."""
    rows = []
    for chunks, partition in _WRAPS:
        way = f"{partition}, {chunks} stage{'s' if chunks > 1 else ''} a rank"
        print(f"measuring Llama-3.1-405B, {way}", file=sys.stderr)
        measured = [run_program(1, "wrap", str(rank), str(chunks), partition)[0] for rank in ranks]
        case = f"Llama-3.1-405B, {WRAP_RANKS} ranks"
        rows.append(_row(case, way, f"worst of {len(ranks)}", measured, WRAP_BYTES, WRAP_SECONDS))
    return rows


def run_program(ranks: int, *arguments: str) -> list[dict[str, Any]]:
    """Reports of ``benchmarks.resident.program`` in rank order; ``RuntimeError`` with its output if it fails.

    The processes are fresh, one thread each. torchrun starts them if ``ranks`` is above 1.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [*launcher, "-m", "benchmarks.resident.program", *arguments]
    paths = [str(_ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory(prefix="nxdpp-memory-") as folder:
        done = subprocess.run(
            [sys.executable, *command, folder],
            cwd=_ROOT,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_TIMEOUT,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}")
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]


def _row(
    case: str,
    way: str,
    ranks: str,
    measured: Sequence[dict[str, Any]],
    peak_limit: int | None,
    seconds_limit: float | None = None,
) -> Row:
    worst = {name: max(run[name] for run in measured) for name in ("owned", "imported", "peak")}
    seconds = [run["seconds"] for run in measured]
    return Row(case, way, ranks, peak_limit=peak_limit, seconds=seconds, seconds_limit=seconds_limit, **worst)


@contextmanager
def _weights(size: str, are_read: bool) -> Iterator[str]:
    """A folder of random weights in shards of 500 MB, removed at the end; ``-`` if no way reads it."""
    if not are_read:
        yield "-"
        return
    with tempfile.TemporaryDirectory(prefix="nxdpp-weights-") as folder:
        print(f"writing weights to {folder}", file=sys.stderr)
        LlamaForCausalLM(SIZES[size]).save_pretrained(folder, max_shard_size="500MB")
        yield folder


def _billions(size: str) -> float:
    with torch.device("meta"):
        return LlamaForCausalLM(SIZES[size]).num_parameters() / 1e9

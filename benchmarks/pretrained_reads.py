"""Bytes that data-parallel replicas read in ``load_pretrained``, and its time: divided among them, and each for itself.

    python benchmarks/pretrained_reads.py            # on an idle machine
    python benchmarks/pretrained_reads.py --quick    # a small model, to try the command

A Llama on 4 replicas of one host. Before a cold load the files are dropped from the page cache.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).resolve().parent.parent))

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.report import markdown_table, session_line
from nxdpp import NxDPPModel, load_pretrained, parallel_state
from nxdpp.checkpoint.distributed import shared_reads
from tests.support.run_ranks import run_ranks

RANKS = 4
WAYS = ("divided, cold", "each for itself, cold", "divided, warm", "each for itself, warm")


class Measured(NamedTuple):
    """Seconds of a load on one rank, bytes that it read by system calls, and bytes of them from the disk."""

    seconds: float
    read: int
    from_disk: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model and one round, to try the command")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds of all ways; the median counts (5)")
    parser.add_argument("--folder", type=Path, metavar="FOLDER", help="on the file system to measure")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds} must be at least 1")
    hidden, rounds = (64, 1) if options.quick else (1024, options.rounds)
    with tempfile.TemporaryDirectory(prefix="nxdpp-pretrained-", dir=options.folder) as folder:
        run_ranks(1, _write, hidden, folder, timeout=300)
        size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
        ranks = run_ranks(RANKS, _measure, hidden, rounds, folder, timeout=1200)
    rows = []
    for number, way in enumerate(WAYS):
        of_rounds = [[rank[turn][number] for rank in ranks] for turn in range(rounds)]
        middle = sorted(of_rounds, key=lambda each: max(one.seconds for one in each))[rounds // 2]
        seconds = max(one.seconds for one in middle)
        read, from_disk = (sum(one[place] for one in middle) / size for place in (1, 2))
        rows.append([way, f"{seconds:.3f}", f"{read:.2f}", f"{from_disk:.2f}"])
    columns = ["way", "loaded (s)", "read by all ranks (times the files)", "from the disk (times the files)"]
    table = markdown_table(columns, rows, left=["way"])
    print(f"{session_line()}\n\n{table}\n\n{size / 1e6:.0f} MB of files on {RANKS} replicas.", flush=True)


def _on_meta(hidden: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=6, num_attention_heads=8, vocab_size=8192
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def _write(_: int, hidden: int, folder: str) -> None:
    model = _on_meta(hidden).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.5)
    model.save_pretrained(folder, max_shard_size="100MB")
    os.sync()


def _measure(_: int, hidden: int, rounds: int, folder: str) -> list[list[Measured]]:
    """For each round the figures of all ways."""
    parallel_state.initialize_model_parallel()
    _load(hidden, folder, "divided, warm")
    return [[_load(hidden, folder, way) for way in WAYS] for _ in range(rounds)]


def _load(hidden: int, folder: str, way: str) -> Measured:
    model = NxDPPModel(_on_meta(hidden))
    if "cold" in way and dist.get_rank() == 0:
        for file in Path(folder).iterdir():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
    with pytest.MonkeyPatch.context() as patch:
        if "itself" in way:
            # Replicas that differ read all of their own.
            patch.setattr(shared_reads, "owners", lambda *_: {})
        dist.barrier()
        start, before = time.perf_counter(), _read_bytes()
        load_pretrained(model, folder)
        seconds, after = time.perf_counter() - start, _read_bytes()
    assert all(bool((parameter == 1.5).all()) for parameter in model.local_parameters())
    return Measured(seconds, after[0] - before[0], after[1] - before[1])


def _read_bytes() -> tuple[int, int]:
    """Bytes that this process has read by system calls, and bytes of these that came from a disk."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"]), int(fields["read_bytes"])


if __name__ == "__main__":
    main()

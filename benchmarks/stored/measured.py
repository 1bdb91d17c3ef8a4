"""Seconds and memory of each way's saves and loads, on the ranks of a pipeline."""

import ctypes
import gc
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from math import nan
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from torch.optim import AdamW

from benchmarks.stored.ways import WAYS, Size, Way, files_of, flush
from nxdpp import NxDPPModel, parallel_state
from nxdpp.checkpoint.distributed.directory import DOCUMENT
from nxdpp.doors.nxd.checkpoint import finalize_checkpoint, save_checkpoint
from tests.support.process_memory import peak_bytes, reset_peak, resident_bytes

_TOKENS = 32


@dataclass(frozen=True)
class Measured:
    """A save and two loads of a rank.

    Attributes:
        held: seconds until the call of the save returned.
        whole: seconds until the bytes were on the disk.
        save_peak: bytes of memory above the bytes before the save.
        cold: seconds of a load whose files are only on the disk; ``nan`` for a way whose files another way has too.
        warm: seconds of a load whose files are in the page cache.
        load_peak: bytes of memory above the bytes before that load.
    """

    held: float
    whole: float
    save_peak: float
    cold: float = nan
    warm: float = nan
    load_peak: float = nan


@dataclass(frozen=True)
class Rank:
    """Results of a rank.

    Attributes:
        owned: bytes of its part.
        ways: medians by the title of the way.
        alone, beside: median seconds of a training step, and of one during an asynchronous save of the optimizer too;
            ``nan`` without an optimizer.
    """

    owned: int
    ways: dict[str, Measured]
    alone: float
    beside: float


def measure_rank(rank: int, size: Size, has_optimizer: bool, rounds: int, path: Path) -> Rank:
    """Return the medians of each way's saves and loads on this rank; collective over the ranks of a pipeline.

    The ways take turns in each round, in an order that begins with a different way each time.
    """
    parallel_state.initialize_model_parallel(1, dist_size())
    torch.manual_seed(0)
    model = NxDPPModel(size.make(), num_microbatches=1)
    model.move_model_to_device()
    optimizer = AdamW(model.local_parameters())
    _step(model, optimizer)
    ways = [way(model, optimizer if has_optimizer else None, size) for way in WAYS[has_optimizer]]
    states = [value for one in optimizer.state.values() for value in one.values()] if has_optimizer else []
    owned = sum(tensor.nbytes for tensor in [*model.local_state_dict().values(), *states])
    found: dict[str, list[Measured]] = {way.title: [] for way in ways}
    # The first round warms up.
    for number in range(rounds + 1):
        first = number % len(ways)
        for way in [*ways[first:], *ways[:first]]:
            measured = _measure(way, path / "checkpoint")
            if number:
                found[way.title].append(measured)
    medians = {title: Measured(*map(median, zip(*map(astuple, many), strict=True))) for title, many in found.items()}
    alone, beside = _steps(model, optimizer, rounds, path) if has_optimizer else (nan, nan)
    return Rank(owned, medians, alone, beside)


def dist_size() -> int:
    """Number of ranks, before ``torch.distributed`` is started."""
    return int(os.environ["WORLD_SIZE"])


def _measure(way: Way, folder: Path) -> Measured:
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    gc.collect()
    with _peak() as peak:
        begin = perf_counter()
        way.save(folder)
        held = perf_counter() - begin
        way.finish(folder)
        whole = perf_counter() - begin
    dist.barrier()
    measured = Measured(held, whole, peak[0])
    if way.loads:
        cold = _load(way, folder, is_cold=True)[0]
        measured = Measured(held, whole, peak[0], cold, *_load(way, folder, is_cold=False))
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return measured


def _load(way: Way, folder: Path, is_cold: bool) -> tuple[float, float]:
    """Seconds and peak of a load."""
    if is_cold and dist.get_rank() == 0:
        for file in files_of(folder):
            _drop(file)
    dist.barrier()
    with _peak() as peak:
        begin = perf_counter()
        way.load(folder)
        seconds = perf_counter() - begin
    dist.barrier()
    return seconds, peak[0]


def _steps(model: NxDPPModel, optimizer: AdamW, rounds: int, path: Path) -> tuple[float, float]:
    """Median seconds of a step by itself, and of one that begins while an asynchronous save is in flight."""
    times: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds):
        times[False] += [_step(model, optimizer) for _ in range(3)]
        tag = f"step_{number}"
        save_checkpoint(path, tag, model, optimizer, async_save=True, num_kept_ckpts=1)
        is_first = True
        while is_first or any(_of_ranks(not (path / tag / DOCUMENT).exists())):
            times[True].append(_step(model, optimizer))
            is_first = False
        finalize_checkpoint()
    return median(times[False]), median(times[True])


def _of_ranks(value: bool) -> list[bool]:
    values = [value] * dist_size()
    dist.all_gather_object(values, value)
    return values


def _step(model: NxDPPModel, optimizer: AdamW) -> float:
    """Seconds of a training step."""
    begin = perf_counter()
    ids = torch.arange(_TOKENS).view(1, _TOKENS)
    model.run_train(input_ids=ids, labels=ids)
    optimizer.step()
    optimizer.zero_grad()
    return perf_counter() - begin


@contextmanager
def _peak() -> Iterator[list[int]]:
    """Give a list that gets the peak bytes of the block, above the bytes before it, at its end."""
    # Memory that was freed hides what the block takes.
    ctypes.CDLL(None).malloc_trim(0)
    reset_peak()
    before = resident_bytes()
    found: list[int] = []
    yield found
    found.append(max(0, peak_bytes() - before))


def _drop(file: Path) -> None:
    """Leave the bytes of a flushed ``file`` only on the disk."""
    flush(file)
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)

"""Ways to save and load one training, each on the ranks of a pipeline."""

import ctypes
import gc
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from math import nan
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.checkpoint.state_dict_saver import async_save as async_save_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.optim import AdamW
from transformers import LlamaConfig, LlamaForCausalLM

from nxdpp import NxDPPModel, parallel_state
from nxdpp.checkpoint.distributed.document_head import DOCUMENT
from nxdpp.trainer.checkpoint import finalize_checkpoint, load_checkpoint, save_checkpoint
from tests.support.process_memory import peak_bytes, reset_peak, resident_bytes

_TOKENS = 32


@dataclass(frozen=True)
class Size:
    """A Llama by its width and number of layers."""

    hidden: int
    layers: int
    vocabulary: int = 4096

    def make(self) -> LlamaForCausalLM:
        """Return the model, in float32."""
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=4 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=8,
            num_key_value_heads=8,
        )
        return LlamaForCausalLM(config)


@dataclass(frozen=True)
class Measured:
    """A save and two loads of a rank.

    Attributes:
        held: seconds until the call of the save returned.
        whole: seconds until the bytes were on the disk.
        save_peak: bytes of memory above those before the save.
        cold: seconds of a load whose files are on the disk alone; ``nan`` for a way whose files another way has too.
        warm: seconds of a load whose files are in the page cache.
        load_peak: bytes of memory above those before that load.
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
        alone, beside: median seconds of a training step, and of one beside an asynchronous save of the optimizer too;
            ``nan`` without an optimizer.
    """

    owned: int
    ways: dict[str, Measured]
    alone: float
    beside: float


class Way(ABC):
    """A way to save the state of all ranks, and to load it; each method is called on all ranks.

    Args:
        model: of which each rank has a part.
        optimizer: of this rank's part; ``None`` to save weights alone.
        size: of the model.
    """

    title = ""
    loads = True
    """False for a way whose files are those of another one."""

    def __init__(self, model: NxDPPModel, optimizer: AdamW | None, size: Size) -> None:
        self.model = model
        self.optimizer = optimizer
        self.size = size

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Save to ``folder``."""

    def finish(self, folder: Path) -> None:  # noqa: B027  # most ways have nothing to wait for
        """Wait until the bytes are on the disk."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Load the files of ``save``."""

    def state(self) -> dict[str, Any]:
        """This rank's part, of torch's own ``state_dict``."""
        state: dict[str, Any] = {"model": self.model.local_state_dict()}
        return state if self.optimizer is None else {**state, "optimizer": self.optimizer.state_dict()}


class Ours(Way):
    """``save_checkpoint`` and ``load_checkpoint``."""

    title = "nxdpp"
    is_async = False

    def save(self, folder: Path) -> None:
        """Save, to the disk."""
        save_checkpoint(folder, "step", self.model, self.optimizer, async_save=self.is_async)

    def finish(self, folder: Path) -> None:
        """Wait for the thread."""
        finalize_checkpoint()

    def load(self, folder: Path) -> None:
        """Load into the memory of the model and the optimizer."""
        load_checkpoint(folder, "step", self.model, self.optimizer)


class OursAsync(Ours):
    """``save_checkpoint(async_save=True)``."""

    title = "nxdpp, asynchronous"
    is_async = True
    loads = False


class TorchSave(Way):
    """``torch.save`` of each rank's part."""

    title = "torch.save, torch.load"

    def _file(self, folder: Path) -> Path:
        return folder / f"{dist.get_rank()}.pt"

    def save(self, folder: Path) -> None:
        """Save a file a rank, to the page cache."""
        torch.save(self.state(), self._file(folder))

    def finish(self, folder: Path) -> None:
        """Flush the file of this rank."""
        _flush(self._file(folder))

    def load(self, folder: Path) -> None:
        """Load the file of this rank, and give it to the model and the optimizer."""
        state = torch.load(self._file(folder), weights_only=True)
        for name, tensor in self.model.local_state_dict().items():
            tensor.copy_(state["model"][name])
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state["optimizer"])


class PlainDCP(Way):
    """``torch.distributed.checkpoint`` with its defaults, which flush each file."""

    title = "torch.distributed.checkpoint"

    def save(self, folder: Path) -> None:
        """Save, to the disk."""
        save_dcp(self._of_rank(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        """Load into the memory of the model and the optimizer."""
        load_dcp(self._of_rank(), checkpoint_id=folder)

    def _of_rank(self) -> dict[str, Any]:
        # Optimizers of all ranks number their parameters from 0 on.
        return {f"rank{dist.get_rank()}": self.state()}


class AsyncDCP(PlainDCP):
    """``async_save`` of ``torch.distributed.checkpoint``."""

    title = "torch.distributed.checkpoint, asynchronous"
    loads = False

    def save(self, folder: Path) -> None:
        """Copy, and save in a thread."""
        self._saved = async_save_dcp(self._of_rank(), checkpoint_id=folder)

    def finish(self, folder: Path) -> None:
        """Wait for the thread."""
        future = self._saved.upload_completion if isinstance(self._saved, AsyncSaveResponse) else self._saved
        future.result()


class Transformers(Way):
    """``save_pretrained`` and ``from_pretrained`` of the whole model, on rank 0."""

    title = "transformers, one rank"

    def __init__(self, model: NxDPPModel, optimizer: AdamW | None, size: Size) -> None:
        super().__init__(model, optimizer, size)
        self._whole = size.make() if dist.get_rank() == 0 else None

    def save(self, folder: Path) -> None:
        """Save the whole model, to the page cache."""
        if self._whole is not None:
            self._whole.save_pretrained(folder)

    def finish(self, folder: Path) -> None:
        """Flush all files."""
        if self._whole is not None:
            for file in _files(folder):
                _flush(file)

    def load(self, folder: Path) -> None:
        """Load the whole model, and copy it: its values are pages of the file until then."""
        if self._whole is not None:
            loaded = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
            with torch.no_grad():
                for own, value in zip(self._whole.parameters(), loaded.parameters(), strict=True):
                    own.copy_(value)


_OF_TRAININGS: tuple[type[Way], ...] = (Ours, OursAsync, TorchSave, PlainDCP, AsyncDCP)
WAYS: dict[bool, tuple[type[Way], ...]] = {True: _OF_TRAININGS, False: (*_OF_TRAININGS, Transformers)}
"""By whether the optimizer is saved too."""


def measure_rank(rank: int, size: Size, has_optimizer: bool, rounds: int, path: Path) -> Rank:
    """Return the medians of each way's saves and loads on this rank; collective over the ranks of a pipeline.

    The ways take turns in each round, in an order that begins with another one each time.
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
        for file in _files(folder):
            _drop(file)
    dist.barrier()
    with _peak() as peak:
        begin = perf_counter()
        way.load(folder)
        seconds = perf_counter() - begin
    dist.barrier()
    return seconds, peak[0]


def _steps(model: NxDPPModel, optimizer: AdamW, rounds: int, path: Path) -> tuple[float, float]:
    """Median seconds of a step alone, and of one that begins while an asynchronous save is in flight."""
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
    """Give a list that has the bytes of memory above those before, at the end of the block."""
    # Memory that was freed hides what the block takes.
    ctypes.CDLL(None).malloc_trim(0)
    reset_peak()
    before = resident_bytes()
    found: list[int] = []
    yield found
    found.append(max(0, peak_bytes() - before))


def _files(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file()]


def _flush(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _drop(file: Path) -> None:
    """Leave the bytes of a flushed ``file`` on the disk alone."""
    _flush(file)
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)

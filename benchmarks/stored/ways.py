"""Ways to save and load the weights of one model, each on the ranks of a pipeline."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from transformers import LlamaConfig, LlamaForCausalLM

from nxdpp import NxDPPModel, parallel_state
from nxdpp.trainer.checkpoint import finalize_checkpoint, load_checkpoint, save_checkpoint

RANKS = 2


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
    """One save or load of a rank.

    Attributes:
        held: seconds until the call returned.
        whole: seconds until the bytes were on the disk, or in the model.
        peak: bytes of memory above those before.
    """

    held: float
    whole: float
    peak: int


class Way:
    """A way to save the weights of all ranks, and to load them; each method is called on all ranks."""

    title = ""

    def __init__(self, model: NxDPPModel, size: Size) -> None:
        self.model = model
        self.size = size

    def save(self, folder: Path) -> None:
        """Save to ``folder``."""
        raise NotImplementedError

    def finish(self, folder: Path) -> None:
        """Wait until the bytes of this rank are on the disk."""
        if dist.get_rank() == 0:
            for file in folder.rglob("*"):
                if file.is_file():
                    _flush(file)

    def load(self, folder: Path) -> None:
        """Load what ``save`` has saved."""
        raise NotImplementedError


class Ours(Way):
    """``save_checkpoint`` and ``load_checkpoint``."""

    title = "nxdpp"
    is_async = False

    def save(self, folder: Path) -> None:
        """Save the model alone."""
        save_checkpoint(folder, "step", self.model, async_save=self.is_async)

    def finish(self, folder: Path) -> None:
        """Wait for the thread."""
        finalize_checkpoint()

    def load(self, folder: Path) -> None:
        """Load the model alone."""
        load_checkpoint(folder, "step", self.model)


class OursAsync(Ours):
    """``save_checkpoint(async_save=True)``."""

    title = "nxdpp, asynchronous"
    is_async = True


class TorchSave(Way):
    """``torch.save`` of each rank's part."""

    title = "torch.save"

    def _file(self, folder: Path) -> Path:
        return folder / f"{dist.get_rank()}.pt"

    def save(self, folder: Path) -> None:
        """Save a file a rank."""
        torch.save(self.model.local_state_dict(), self._file(folder))

    def finish(self, folder: Path) -> None:
        """Flush the file of this rank."""
        _flush(self._file(folder))

    def load(self, folder: Path) -> None:
        """Copy the file of this rank into the model."""
        _copy_into(self.model, torch.load(self._file(folder), weights_only=True))


class PlainDCP(Way):
    """``torch.distributed.checkpoint`` with its own files."""

    title = "torch.distributed.checkpoint"

    def save(self, folder: Path) -> None:
        """Save files of torch's format."""
        save_dcp(self.model.local_state_dict(), storage_writer=FileSystemWriter(folder))

    def finish(self, folder: Path) -> None:
        """Return: the writer has flushed its files."""

    def load(self, folder: Path) -> None:
        """Load into the model's memory."""
        load_dcp(self.model.local_state_dict(), storage_reader=FileSystemReader(folder))


class Transformers(Way):
    """``save_pretrained`` and ``from_pretrained`` of the whole model, on rank 0."""

    title = "transformers, one rank"

    def __init__(self, model: NxDPPModel, size: Size) -> None:
        super().__init__(model, size)
        self._whole = size.make() if dist.get_rank() == 0 else None

    def save(self, folder: Path) -> None:
        """Save the whole model."""
        if self._whole is not None:
            self._whole.save_pretrained(folder)

    def load(self, folder: Path) -> None:
        """Load the whole model, and keep it in the place of the one before."""
        if self._whole is not None:
            self._whole = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


WAYS: tuple[type[Way], ...] = (Ours, OursAsync, TorchSave, PlainDCP, Transformers)


def measure_rank(rank: int, size: Size, rounds: int, path: Path) -> tuple[int, dict[str, dict[str, Measured]]]:
    """Return the bytes of this rank's part, and the medians of each way's saves and loads.

    The ways take turns in each round, in an order that begins with another one each time.
    """
    parallel_state.initialize_model_parallel(1, RANKS)
    model = NxDPPModel(size.make(), num_microbatches=1)
    model.move_model_to_device()
    owned = sum(tensor.nbytes for tensor in model.local_state_dict().values())
    ways = [way(model, size) for way in WAYS]
    found: dict[str, dict[str, list[Measured]]] = {way.title: {"save": [], "load": []} for way in ways}
    # The first round warms up.
    for number in range(rounds + 1):
        first = number % len(ways)
        for way in [*ways[first:], *ways[:first]]:
            saved, loaded = _measure(way, path / "checkpoint")
            if number:
                found[way.title]["save"].append(saved)
                found[way.title]["load"].append(loaded)
    return owned, {title: {what: _middle(many) for what, many in one.items()} for title, one in found.items()}


def _measure(way: Way, folder: Path) -> tuple[Measured, Measured]:
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    with _peak() as peak:
        begin = perf_counter()
        way.save(folder)
        held = perf_counter() - begin
        way.finish(folder)
        saved = perf_counter() - begin
    dist.barrier()
    with _peak() as other_peak:
        begin = perf_counter()
        way.load(folder)
        loaded = perf_counter() - begin
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return Measured(held, saved, peak[0]), Measured(loaded, loaded, other_peak[0])


def _middle(many: list[Measured]) -> Measured:
    return Measured(
        median(one.held for one in many), median(one.whole for one in many), int(median(one.peak for one in many))
    )


@contextmanager
def _peak() -> Iterator[list[int]]:
    """Give a list that has the bytes of memory above those before, at the end of the block."""
    # 5 makes the kernel begin its peak anew.
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    found: list[int] = []
    yield found
    found.append(max(0, _status("VmHWM") - before))


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def _flush(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _copy_into(model: NxDPPModel, state: dict[str, Any]) -> None:
    for name, tensor in model.local_state_dict().items():
        tensor.copy_(state[name])

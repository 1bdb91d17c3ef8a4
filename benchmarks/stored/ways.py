"""Ways to save and load one training, each on the ranks of a pipeline."""

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.checkpoint.state_dict_saver import async_save as async_save_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.optim import AdamW
from transformers import LlamaConfig, LlamaForCausalLM

from nxdpp import NxDPPModel
from nxdpp.doors.nxd.checkpoint import finalize_checkpoint, load_checkpoint, save_checkpoint


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


class Way(ABC):
    """A way to save the state of all ranks, and to load it; each method is called on all ranks.

    Args:
        model: each rank has a part of it.
        optimizer: of this rank's part; ``None`` to save only weights.
        size: of the model.
    """

    title = ""
    loads = True
    """False for a way that has another way's files."""

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
        return state if self.optimizer is None else {**state, "optimizer": dict(self.optimizer.state_dict())}


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
        flush(self._file(folder))

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
            for file in files_of(folder):
                flush(file)

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


def files_of(folder: Path) -> list[Path]:
    """The files in ``folder`` and below."""
    return [file for file in folder.rglob("*") if file.is_file()]


def flush(file: Path) -> None:
    """Wait until the bytes of ``file`` are on the disk."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Place of the first hour: its device and sizes, and a rank of it."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from nxdpp import parallel_state
from nxdpp.devices import accelerator
from nxdpp.devices.kinds import kind_of

CPU, FAKE = "cpu", "fake"
# How ranks have their devices.
OWN, SHARED, ONE_CHIP = "one each", "one for all, over gloo", "one for all, over its own backend"


class Size(NamedTuple):
    """Sizes of a Llama and of its batches."""

    hidden: int
    vocabulary: int
    sequence: int


class Place(NamedTuple):
    """A type of device, such as ``"cuda"``; the number of visible ones; ``dry`` for models of a few kilobytes."""

    device: str
    visible: int
    dry: bool

    @property
    def backend(self) -> str:
        """The backend of ``torch.distributed`` for the type."""
        return kind_of(self.device).backend

    @property
    def size(self) -> Size:
        """Size of the models of all parts but ``speed``."""
        return Size(32, 64, 16) if self.dry else Size(1024, 8192, 512)

    def has_own(self, ranks: int) -> bool:
        """Return whether each of ``ranks`` has a device of its own; each process has a CPU and a fake accelerator."""
        return self.device in (CPU, FAKE) or ranks <= self.visible

    def llama(self, layers: int, **settings: Any) -> Any:
        """Return a Llama in host memory, with the same weights at each call."""
        torch.manual_seed(0)
        size = self.size
        config = LlamaConfig(
            vocab_size=size.vocabulary, hidden_size=size.hidden, intermediate_size=2 * size.hidden,
            num_hidden_layers=layers, num_attention_heads=4, tie_word_embeddings=False,
            **{"use_cache": False} | settings,
        )  # fmt: skip
        return LlamaForCausalLM(config)

    def ids(self, rows: int, seed: int = 1) -> torch.Tensor:
        """Return token ids ``(rows, T)`` in host memory."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.size.vocabulary, (rows, self.size.sequence), generator=generator)


def find_place(device: str | None, dry: bool) -> Place:
    """Return the place for a type of device, by default this machine's accelerator, or the CPU for a dry run.

    Raises ``ValueError`` where there is no such device.
    """
    kind = device or (CPU if dry else accelerator.present())
    if kind is None:
        raise ValueError("torch finds no accelerator here. Repair its driver, or try the parts on the CPU by --dry.")
    install(kind)
    visible = 0 if kind == CPU else accelerator.count(kind)
    if kind != CPU and not visible:
        raise ValueError(f"torch finds no device of the type {kind!r}. Repair its driver, or leave --device out.")
    return Place(kind, visible, dry or kind in (CPU, FAKE))


def install(device: str) -> None:
    """Register the fake accelerator of the tests, if it is meant."""
    if device == FAKE:
        from tests.support import fake_device

        fake_device.install()


@dataclass(frozen=True)
class Rank:
    """A rank of a program: its number, the number of ranks, and how they have their devices."""

    place: Place
    number: int
    count: int
    way: str

    def begin(self, pipeline: int | None = None, **settings: Any) -> torch.device:
        """Start the groups for ``pipeline`` stages, by default all ranks; return this rank's device."""
        settings["pipeline_model_parallel_size"] = pipeline or self.count
        if self.way == SHARED:
            parallel_state.initialize_model_parallel(backend="gloo", **settings)
            return torch.device(CPU) if self.place.device == CPU else torch.device(self.place.device, 0)
        if self.way == ONE_CHIP and not dist.is_initialized():
            # nxdpp refuses two ranks of one device where it starts the world.
            torch.accelerator.set_device_index(0)
            dist.init_process_group(self.place.backend)
        parallel_state.initialize_model_parallel(device=self.place.device, **settings)
        return parallel_state.local_device()


class Found(NamedTuple):
    """Findings of a case on a rank: figures, and a sentence if they show a fault."""

    figures: dict[str, Any]
    problem: str = ""


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest element; 0 for equal bits."""
    if torch.equal(ours, theirs):
        return 0.0
    difference = float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp_min(1e-30))
    return difference if difference == difference else float("inf")

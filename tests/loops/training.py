"""The training of a drawn script in one process."""

import contextlib
import copy
import zlib
from collections.abc import Mapping
from typing import Any

import torch

from tests.loops.compare import Event, Numbers
from tests.loops.draw import LAYOUTS, Script
from tests.loops.models import Model, batch


class Training:
    """A training in one process.

    Attributes:
        module: the user's module.
        wrapped: what the script lists parameters of.
        clip: the greatest norm and the function that clips, in each step.
        accumulate: number of backwards of a step, and whether each averages over the replicas.
        zeroes: what becomes of gradients after a step.
        events: the numbers of what was done, in order.
        doing: the action that runs.
    """

    def __init__(self, script: Script, module: Model) -> None:
        self.script = script
        self.module: Any = module
        self.wrapped: Any = module
        self.optimizer: Any = None
        self.clip: tuple[float | None, str] = (None, "method")
        self.accumulate = (1, True)
        self.zeroes = "none"
        self.rows, self.length = script.rows, script.length
        self.events: list[Event] = []
        self.doing = ""
        self.replicas = LAYOUTS[script.layout][2]
        self._batches = 0
        self._class: Any = None
        self._saved: Any = None

    def root(self, name: str) -> Any:
        """The module that a line of the script lists: the wrapped one, the user's or the local one."""
        return self.module if name == "module" else self.wrapped

    def fill(self, parameter: torch.Tensor, name: str) -> None:
        """Set values that follow from ``name``."""
        parameter.copy_(values_of(name, parameter.shape))

    def make_optimizer(self, kind: str, groups: list[Any]) -> None:
        """Make an optimizer of a kind over parameters or groups of them."""
        if kind == "Muon":
            groups = [_matrices(group) for group in groups]
            groups = [group for group in groups if group is not None]
        self._class = getattr(torch.optim, "SGD" if kind == "momentum" else kind)
        self.optimizer = self.new_optimizer(
            self._class, groups, {"lr": 0.01} | ({"momentum": 0.9} if kind == "momentum" else {})
        )

    def new_optimizer(self, kind: Any, groups: list[Any], options: dict[str, Any]) -> Any:
        """Make an optimizer of the class ``kind``."""
        return kind(groups, **options)

    def remake_optimizer(self) -> None:
        """Make an optimizer of the same class, groups and options, without a state."""
        groups = [{**group, "params": list(group["params"])} for group in self.optimizer.param_groups]
        self.optimizer = self.new_optimizer(self._class, groups, {"lr": 0.01})

    def step(self) -> None:
        """Train a step, and note its losses, gradients, parameters and buffers."""
        count, syncs = self.accumulate
        for each in range(count):
            with contextlib.nullcontext() if syncs or each == count - 1 else self.no_sync():
                self.note("loss", self.backward(self.next_batch()))
        self.note_gradients("gradient")
        norm, function = self.clip
        if norm is not None:
            torchs = torch.nn.utils.clip_grad_norm_
            self.note(
                "norm", {"all": torchs(self.wrapped.parameters(), norm) if function == "torch" else self.clipped(norm)}
            )
            self.note_gradients("clipped gradient")
        self.optimizer.step()
        if self.zeroes != "kept":
            self.optimizer.zero_grad(set_to_none=self.zeroes == "none")
        self.note("value", dict(self.wrapped.named_parameters(remove_duplicate=False)))
        self.note("buffer", dict(self.wrapped.named_buffers()))

    def note_gradients(self, what: str) -> None:
        """Note the gradients of all parameters."""
        self.note(what, {name: p.grad for name, p in self.wrapped.named_parameters(remove_duplicate=False)})

    def note(self, what: str, numbers: Numbers, is_whole: bool = False) -> None:
        """Keep numbers, which a rank compares with its own."""
        values = {name: None if value is None else value.detach().clone() for name, value in numbers.items()}
        self.events.append(Event(self.doing, what, values))

    def next_batch(self) -> dict[str, torch.Tensor]:
        """The next batch of all replicas."""
        self._batches += 1
        return batch(self._batches, self.rows, self.length, self.script.kind.weighted)

    def backward(self, values: Mapping[str, torch.Tensor]) -> Numbers:
        """Run forward and backward of all microbatches; return the loss of each replica."""
        losses = []
        number = self.script.microbatches * self.replicas
        for part in _parts(values, number):
            loss = self.module(**part)["loss"]
            (loss / number).backward()
            losses.append(loss.detach())
        return self._of_replicas(losses)

    def evaluate(self) -> None:
        """Note the loss of a batch without gradients."""
        with torch.no_grad():
            parts = _parts(self.next_batch(), self.script.microbatches * self.replicas)
            self.note("evaluation", self._of_replicas([self.module(**part)["loss"] for part in parts]))

    def _of_replicas(self, losses: list[torch.Tensor]) -> Numbers:
        return {f"replica {i}": part.mean() for i, part in enumerate(torch.stack(losses).chunk(self.replicas))}

    def no_sync(self) -> Any:
        """A context without averages over the replicas."""
        return contextlib.nullcontext()

    def clipped(self, norm: float) -> torch.Tensor:
        """Clip the gradients by the norm of the whole model; return the norm before."""
        return torch.nn.utils.clip_grad_norm_(self.module.parameters(), norm)

    def save(self) -> None:
        """Save the training."""
        self._saved = copy.deepcopy((self.module.state_dict(), self.optimizer.state_dict()))

    def load(self) -> None:
        """Load what was saved."""
        self.module.load_state_dict(self._saved[0])
        self.optimizer.load_state_dict(copy.deepcopy(self._saved[1]))

    def note_files(self, way: str) -> None:
        """Note the whole state dict."""
        self.note(f"file ({way})", self.module.state_dict())

    def recompute(self) -> None:
        """Do nothing: layers that are recomputed have the numbers of the others, also where they change buffers."""


def values_of(name: str, shape: Any) -> torch.Tensor:
    """Values that follow from ``name``."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64) * 0.5


def _parts(values: Mapping[str, torch.Tensor], number: int) -> list[dict[str, torch.Tensor]]:
    """The batch in ``number`` microbatches, which share its weights."""
    shared = {name: value for name, value in values.items() if name == "weights"}
    rows = [value.chunk(number) for name, value in values.items() if name not in shared]
    return [{"ids": ids, "labels": labels, **shared} for ids, labels in zip(*rows, strict=True)]


def _matrices(group: Any) -> Any:
    """The matrices of a group; a parameter itself if it is one."""
    if isinstance(group, dict):
        return {**group, "params": [parameter for parameter in group["params"] if parameter.ndim == 2]}
    return group if group.ndim == 2 else None

"""The training of a drawn script in one process."""

import contextlib
import copy
import zlib
from collections.abc import Mapping
from typing import Any

import torch

from tools.loops.compare import Event, Numbers
from tools.loops.draw import LAYOUTS, Script
from tools.loops.models import Model, batch


class Training:
    """A training in one process.

    Attributes:
        module: the user's module.
        wrapped: what the script lists parameters of.
        clip: the greatest norm and the function that clips, in each step.
        accumulate: number of backwards of a step, and whether each averages over the replicas.
        zeroes: what becomes of gradients after a step.
        count: number of microbatches of a replica, where the script gives each of them.
        with_signal: the microbatches that have floats: "all", "even", "odd", "first" or "none".
        cut: number of tokens that every second microbatch lacks.
        parts: the optimizer of each part, and the steps after which it makes one.
        events: the numbers of what was done, in order.
        doing: the action that runs.
    """

    def __init__(self, script: Script, module: Model) -> None:
        self.script = script
        self.module: Any = module
        self.wrapped: Any = module
        self.parts: list[tuple[Any, int]] = []
        self.clip: tuple[float | None, str] = (None, "method")
        self.accumulate = (1, True)
        self.zeroes = "none"
        self.count: int | None = None
        self.with_signal = "all"
        self.cut = 0
        self.rows, self.length = script.rows, script.length
        self.events: list[Event] = []
        self.doing = ""
        self.replicas = LAYOUTS[script.layout][2]
        # Over several stages or replicas layers draw from streams, and the program's generator moves once in a step.
        # Replicas may evaluate as often as each likes: then it stays.
        self._has_streams = script.kind.draws == "torch's" and LAYOUTS[script.layout][1:] != (1, 1)
        self._batches = 0
        self._steps = 0
        self._saved: Any = None

    def root(self, name: str) -> Any:
        """The module that a line of the script lists: the wrapped one, the user's or the local one."""
        return self.module if name == "module" else self.wrapped

    def fill(self, parameter: torch.Tensor, name: str) -> None:
        """Set values that follow from ``name``."""
        parameter.copy_(values_of(name, parameter.shape))

    @property
    def groups(self) -> list[Any]:
        """The groups of all optimizers."""
        return [group for optimizer, _ in self.parts for group in optimizer.param_groups]

    def optimizer_of(self, kind: str, groups: list[Any]) -> Any:
        """Make an optimizer of a kind over parameters or groups of them."""
        if kind == "Muon":
            groups = [_matrices(group) for group in groups]
            groups = [group for group in groups if group is not None]
        made = getattr(torch.optim, "SGD" if kind == "momentum" else kind)
        return self.new_optimizer(made, groups, {"lr": 0.01} | ({"momentum": 0.9} if kind == "momentum" else {}))

    def add_group(self, parameters: list[Any]) -> None:
        """Give the first optimizer those of the parameters that its kind trains."""
        optimizer, _ = self.parts[0]
        if self.class_of(optimizer) is torch.optim.Muon:
            parameters = [parameter for parameter in parameters if parameter.ndim == 2]
        optimizer.add_param_group({"params": parameters, "lr": 0.02})

    def new_optimizer(self, kind: Any, groups: list[Any], options: dict[str, Any]) -> Any:
        """Make an optimizer of the class ``kind``."""
        return kind(groups, **options)

    def remake_optimizers(self) -> None:
        """Make optimizers of the same classes, groups and options, without a state."""
        self.parts = [(self._remade(optimizer), every) for optimizer, every in self.parts]

    def _remade(self, optimizer: Any) -> Any:
        groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
        return self.new_optimizer(self.class_of(optimizer), groups, {"lr": 0.01})

    def class_of(self, optimizer: Any) -> Any:
        """The class that ``new_optimizer`` made it of."""
        return type(optimizer)

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
        self._steps += 1
        for optimizer, every in self.parts:
            if self._steps % every:
                continue
            optimizer.step()
            if self.zeroes != "kept":
                optimizer.zero_grad(set_to_none=self.zeroes == "none")
        if self.script.kind.draws:
            self.note("number of torch's generator", {"all": torch.rand(())})
        self.note("value", dict(self.wrapped.named_parameters(remove_duplicate=False)))
        self.note("buffer", dict(self.wrapped.named_buffers()))

    def note_gradients(self, what: str) -> None:
        """Note the gradients of all parameters."""
        self.note(what, {name: p.grad for name, p in self.wrapped.named_parameters(remove_duplicate=False)})

    def note(self, what: str, numbers: Numbers, is_whole: bool = False) -> None:
        """Keep numbers, which a rank compares with its own."""
        values = {name: None if value is None else value.detach().clone() for name, value in numbers.items()}
        self.events.append(Event(self.doing, what, values))

    def next_batch(self, rows: int | None = None) -> dict[str, torch.Tensor]:
        """The next batch of all replicas."""
        self._batches += 1
        return batch(self._batches, rows or self.rows, self.length, self.script.kind)

    def backward(self, values: Mapping[str, torch.Tensor]) -> Numbers:
        """Run forward and backward of all microbatches; return the loss of each replica."""
        losses = {}
        for replica in range(self.replicas):
            parts = self.microbatches(self.rows_of(values, replica))
            of_parts = []
            for part in parts:
                loss = self._loss(part)
                (loss / len(parts) / self.replicas).backward()
                of_parts.append(loss.detach())
            losses[f"replica {replica}"] = torch.stack(of_parts).mean()
        self._end_streams()
        return losses

    def evaluate(self, rows: int | None = None, everywhere: bool = False) -> None:
        """Note the loss of a batch without gradients, of ``rows`` in each replica if they are given."""
        values = self.next_batch() if rows is None else self.next_batch(rows * self.replicas)
        with torch.no_grad():
            losses = self.evaluation(values, rows is None or self.script.mixes_rows)
        if self.replicas == 1:
            self._end_streams()
        self.note("evaluation", losses)

    def evaluation(self, values: Mapping[str, torch.Tensor], is_split: bool) -> Numbers:
        """The loss of each replica, over microbatches or in one piece."""
        losses = {}
        for replica in range(self.replicas):
            of_replica = self.rows_of(values, replica)
            parts = self.split(of_replica, self.script.microbatches) if is_split else [of_replica]
            losses[f"replica {replica}"] = torch.stack([self._loss(part) for part in parts]).mean()
        return losses

    def _loss(self, part: Mapping[str, torch.Tensor], **options: bool) -> torch.Tensor:
        with torch.random.fork_rng(enabled=self._has_streams):
            loss: torch.Tensor = self.module(**part, **options)["loss"]
        return loss

    def _end_streams(self) -> None:
        if self._has_streams:
            torch.empty((), dtype=torch.int64).random_()

    def rows_of(self, values: Mapping[str, torch.Tensor], replica: int) -> dict[str, torch.Tensor]:
        """The batch of a replica."""
        own = {name: each.chunk(self.replicas)[replica] for name, each in values.items() if name != "weights"}
        return {**values, **own}

    def microbatches(self, values: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """The microbatches of a replica's batch."""
        return self.split(values, min(self.count or self.script.microbatches, len(values["ids"])))

    def split(self, values: Mapping[str, torch.Tensor], number: int) -> list[dict[str, torch.Tensor]]:
        """The batch in ``number`` microbatches, of which some are shorter or have no floats. All have its weights."""
        parts: list[dict[str, torch.Tensor]] = [{} for _ in range(number)]
        for name, value in values.items():
            rows = [value] * number if name == "weights" else value.tensor_split(number)
            for place, (part, own) in enumerate(zip(parts, rows, strict=True)):
                if name != "signal" or _has_signal(place, self.with_signal):
                    length = self.length - self.cut * (place % 2)
                    part[name] = own[:length] if name == "weights" else own[:, :length]
        return parts

    def no_sync(self) -> Any:
        """A context without averages over the replicas."""
        return contextlib.nullcontext()

    def clipped(self, norm: float) -> torch.Tensor:
        """Clip the gradients by the norm of the whole model; return the norm before."""
        return torch.nn.utils.clip_grad_norm_(self.module.parameters(), norm)

    def save(self) -> None:
        """Save the training."""
        of_optimizers = [optimizer.state_dict() for optimizer, _ in self.parts]
        self._saved = copy.deepcopy((self.module.state_dict(), of_optimizers, torch.get_rng_state()))

    def load(self) -> None:
        """Load what was saved."""
        self.module.load_state_dict(self._saved[0])
        for (optimizer, _), state in zip(self.parts, self._saved[1], strict=True):
            optimizer.load_state_dict(copy.deepcopy(state))
        torch.set_rng_state(self._saved[2])

    def note_files(self, way: str) -> None:
        """Note the whole state dict."""
        self.note(f"file ({way})", self.module.state_dict())

    def recompute(self) -> None:
        """Do nothing: layers that are recomputed have the numbers of the others, also where they change buffers."""


class WholeTraining(Training):
    """The script that a user has in one process: one forward and one backward of the batch of all replicas.

    It knows no microbatches. Rows whose microbatch has no floats have zeros. See ``Script.has_equal_rows``.
    """

    def backward(self, values: Mapping[str, torch.Tensor]) -> Numbers:
        number = min(self.count or self.script.microbatches, len(values["ids"]) // self.replicas)
        losses = self._loss(self._with_zeros(values, number), is_mean=False)
        losses.mean().backward()
        self._end_streams()
        return self._of_replicas(losses.detach())

    def evaluation(self, values: Mapping[str, torch.Tensor], is_split: bool) -> Numbers:
        number = self.script.microbatches if is_split else 1
        return self._of_replicas(self._loss(self._with_zeros(values, number), is_mean=False))

    def _with_zeros(self, values: Mapping[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
        """``values`` with zeros in place of the floats that some of ``number`` microbatches of a replica lack."""
        if self.with_signal == "all":
            return dict(values)
        rows = values["signal"].chunk(self.replicas * number)
        kept = [own * _has_signal(place % number, self.with_signal) for place, own in enumerate(rows)]
        return {**values, "signal": torch.cat(kept)}

    def _of_replicas(self, losses: torch.Tensor) -> Numbers:
        return {f"replica {number}": own.mean() for number, own in enumerate(losses.chunk(self.replicas))}


def values_of(name: str, shape: Any) -> torch.Tensor:
    """Values that follow from ``name``."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64) * 0.5


def _has_signal(place: int, which: str) -> bool:
    return {"all": True, "even": place % 2 == 0, "odd": place % 2 == 1, "first": place == 0, "none": False}[which]


def _matrices(group: Any) -> Any:
    """The matrices of a group; a parameter itself if it is one."""
    if isinstance(group, dict):
        return {**group, "params": [parameter for parameter in group["params"] if parameter.ndim == 2]}
    return group if group.ndim == 2 else None

"""Models as users write them: three layers, a small input (B, WIDTH), and one construct each."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

WIDTH = 4


class Block(nn.Module):
    """The transformer layer of these models."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(hidden))


class Base(nn.Module):
    """An embedding, blocks and a head; a subclass joins them in its forward."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def through(self, blocks: Iterable[nn.Module], hidden: Any) -> Any:
        for block in blocks:
            hidden = block(hidden)
        return hidden

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.close(self.through(self.blocks, self.embedding(x)))

    def close(self, hidden: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.head(hidden).square().mean()
        return loss


class Skips(Base):
    """Skip connections from every block's input to the end, in reverse order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x)
        skips = []
        for block in self.blocks:
            skips.append(hidden)
            hidden = block(hidden)
        while skips:
            hidden = hidden * skips.pop() + hidden
        return self.close(hidden)


class SeveralInputs(Base):
    """Inputs of several types, used early and late; keyword-only inputs with and without a default."""

    def forward(
        self, x: torch.Tensor, late: torch.Tensor, *rest: Any, target: torch.Tensor, scale: float = 2.0, **more: Any
    ) -> dict[str, torch.Tensor]:
        hidden = self.through(self.blocks, self.embedding(x)) * scale + late
        if more.get("extra") is not None:
            hidden = hidden + more["extra"]
        loss = nn.functional.mse_loss(self.head(hidden), target)
        return {"loss": loss, "hidden": hidden}


@dataclass
class State:
    hidden: torch.Tensor
    history: list[torch.Tensor] = field(default_factory=list)
    count: int = 0


class Pair(NamedTuple):
    hidden: torch.Tensor
    other: torch.Tensor | None


class DataclassBlock(Block):
    def forward(self, state: Any) -> Any:
        hidden = super().forward(state.hidden)
        return State(hidden, [*state.history, hidden * 2], state.count + 1)


class Dataclasses(Base):
    """A dataclass between layers; each layer adds a tensor."""

    def __init__(self) -> None:
        super().__init__(DataclassBlock)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.through(self.blocks, State(self.embedding(x)))
        return self.close(state.hidden + state.history[0] * state.count)


@dataclass(frozen=True, slots=True)
class Frozen:
    hidden: torch.Tensor
    before: torch.Tensor


class TupleBlock(Block):
    def forward(self, hidden: Any, other: Any = None) -> Any:
        new = super().forward(hidden)
        return Pair(new, hidden if other is None else other * new)


class NamedTuples(Base):
    """A named tuple, unpacked into the next layer; one of its values is None at first."""

    def __init__(self) -> None:
        super().__init__(TupleBlock)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pair = Pair(self.embedding(x), None)
        for block in self.blocks:
            hidden, other = pair
            pair = block(hidden, other=other)
        hidden, other = pair
        return self.close(hidden + (0 if other is None else other))


class DictBlock(Block):
    def forward(self, values: Any) -> Any:
        hidden = super().forward(values["hidden"])
        return {"hidden": hidden, "kept": {"all": (hidden, values["hidden"]), "name": "text", "none": None}}


class Dicts(Base):
    """Nested dicts between layers."""

    def __init__(self) -> None:
        super().__init__(DictBlock)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = self.through(self.blocks, {"hidden": self.embedding(x)})
        return self.close(values["hidden"] + values["kept"]["all"][1])


class AliasBlock(Block):
    """Takes two inputs, which may be one tensor, and changes the first in place."""

    def forward(self, values: Any) -> Any:
        first, second = values
        first += 1
        hidden = self.linear(second.clone())
        return hidden, [hidden]


class Aliases(Base):
    """One tensor twice in a layer's output; the next layer changes one of the two in place."""

    def __init__(self) -> None:
        super().__init__(AliasBlock)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x) * 1
        first, (second,) = hidden, [hidden]
        for block in self.blocks:
            first, (second,) = block((first, second))
        return self.close(first + second)


class NormBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.plain_norm = nn.BatchNorm1d(WIDTH, affine=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.plain_norm(self.norm(super().forward(hidden)))
        return result


class StepCounter(nn.Module):
    """Two buffers that a forward changes, and no parameter."""

    steps: torch.Tensor
    last: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(WIDTH), persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.last = hidden.detach().abs().mean(0)
        return hidden * self.steps


class BatchNorms(Base):
    """Batch norms in and beside the layers, with and without parameters; the output of one is not used."""

    def __init__(self) -> None:
        super().__init__(NormBlock)
        self.first_norm = nn.BatchNorm1d(WIDTH)
        self.middle_norm = nn.BatchNorm1d(WIDTH, affine=False, momentum=None)
        self.watcher = nn.BatchNorm1d(WIDTH, affine=False)
        self.last_norm = nn.BatchNorm1d(WIDTH, affine=False)
        self.counter = StepCounter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first_norm(self.embedding(x))
        hidden = self.middle_norm(self.blocks[0](hidden))
        self.watcher(hidden)
        hidden = self.counter(self.blocks[1](hidden))
        return self.close(self.last_norm(self.blocks[2](hidden)))


class UsedTwice(Base):
    """A projection, a norm and an activation, each used before, between and after the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.activation = nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.activation(self.projection(self.embedding(x)))
        hidden = self.activation(self.norm(self.blocks[0](hidden)))
        hidden = self.blocks[2](self.blocks[1](hidden))
        return self.close(self.activation(self.norm(self.projection(hidden))))


def sequential() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), Block(), nn.ReLU(), Block(), nn.Sequential(Block(), nn.ReLU()), Mean()
    )


class Mean(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.square().mean()


class WithLoss(nn.Module):
    """A Sequential with a loss around it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*list(sequential().children())[:-1])
        self.criterion = nn.CrossEntropyLoss(weight=torch.arange(1.0, WIDTH + 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.body(x)
        return logits if labels is None else (self.criterion(logits, labels), logits)


class Containers(nn.Module):
    """Layers in a dict, a list and a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name = nn.ModuleDict({"first": Block(), "spare": nn.Identity()})
        self.listed = nn.ModuleList([nn.ModuleDict({"layer": Block(), "norm": nn.LayerNorm(WIDTH)})])
        self.chain = nn.Sequential(Block(), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.by_name["first"](x)
        for member in self.listed:
            assert isinstance(member, nn.ModuleDict)
            hidden = member["norm"](member["layer"](hidden)) + hidden
        loss: torch.Tensor = self.chain(hidden).square().mean()
        return loss


SHIFT = torch.linspace(0, 1, WIDTH)


class Constants(Base):
    """Tensors made in forward, attributes that are neither buffer nor parameter, parameters used directly."""

    offset: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.scales = nn.ParameterList([nn.Parameter(torch.full((WIDTH,), 0.5 + i)) for i in range(3)])
        self.named = nn.ParameterDict({"last": nn.Parameter(torch.ones(1, WIDTH))})
        self.table = torch.arange(WIDTH) / WIDTH
        self.register_buffer("offset", torch.linspace(-1, 0, WIDTH))
        self.factor = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x) * self.scale + self.table
        for index, block in enumerate(self.blocks):
            hidden = block(hidden) * self.scales[index] + self.offset + self.table
            hidden = hidden + torch.arange(WIDTH, device=x.device) * self.factor
        hidden = hidden * self.scale + self.named["last"].expand(x.shape[0], -1)
        return self.close(hidden + torch.zeros_like(hidden) + torch.tensor([1.0, 2.0, 3.0, 4.0]))


class OutputsParameters(Base):
    """Returns parameters and buffers beside the loss."""

    offset: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("offset", torch.linspace(-1, 0, WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        loss = self.close(self.through(self.blocks, self.embedding(x) * self.scale))
        return loss, {"scale": self.scale, "offset": self.offset, "weight": self.embedding.weight}


@dataclass
class Output:
    loss: torch.Tensor
    hidden: torch.Tensor | None = None
    parts: tuple[torch.Tensor, ...] = ()


class DataclassOutput(Base):
    """Returns a dataclass."""

    def forward(self, x: torch.Tensor) -> Any:
        early = self.embedding(x)
        hidden = self.through(self.blocks, early)
        return Output(self.close(hidden), hidden, (early, hidden * 2))


class Holder:
    """An object that is not a pytree."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class HolderBlock(Block):
    def forward(self, holder: Any) -> Any:
        return Holder(super().forward(holder.hidden if isinstance(holder, Holder) else holder))


class Objects(Base):
    """Objects that are not pytrees between layers."""

    def __init__(self) -> None:
        super().__init__(HolderBlock)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.close(self.through(self.blocks, self.embedding(x)).hidden)


class InPlaceActivations(Base):
    """Activations that change their input in place; later stages use the changed input."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.relu(self.embedding(x) + 0)
        for block in self.blocks:
            hidden = self.relu(block(hidden) + hidden)
        return self.close(hidden)


class ChangingBlock(Block):
    """Changes its input in place."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden += 1
        result: torch.Tensor = self.linear(hidden.clone())
        return result


class ChangesInput(Base):
    """A layer changes the model's input in place; a later layer uses it too."""

    def __init__(self) -> None:
        super().__init__(ChangingBlock)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks[0](x)
        return self.close(self.blocks[2](self.blocks[1](hidden) + x))


class SharedCounter(Base):
    """One counter for all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = StepCounter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x)
        for block in self.blocks:
            hidden = self.counter(block(hidden))
        return self.close(hidden)


class SharedBatchNorm(Base):
    """One batch norm for all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x)
        for block in self.blocks:
            hidden = self.norm(block(hidden))
        return self.close(hidden)


class CountsInForward(Base):
    """The model's own forward changes a buffer; ``way`` is the kind of change."""

    steps: torch.Tensor

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.register_buffer("steps", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "method":
            self.steps.add_(1)
        elif self.way == "item":
            self.steps[0] = 1.0
        elif self.way == "view":
            self.steps[1:].mul_(2)
        elif self.way == "operator":
            self.steps += 1
        else:
            self.steps = self.steps + 1
        return self.close(self.through(self.blocks, self.embedding(x)) * self.steps)


class ReadsStatistics(Base):
    """Reads the statistics of a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.through(self.blocks, self.norm(self.embedding(x)))
        return self.close(hidden + self.norm.running_mean)


class Repeats(Base):
    """One module is the first and the last layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.close(self.through([*self.blocks, self.blocks[0]], self.embedding(x)))


class TiedBlocks(Base):
    """Three layers that share one linear module: by a shallow copy, and by assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.blocks[0], copy.copy(self.blocks[0]), Block()])
        self.blocks[2].linear = self.blocks[0].linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x)


class SharedWeights(Base):
    """Three layers that share their parameters, in place of one layer that runs three times."""

    def __init__(self) -> None:
        super().__init__()
        first, *others = [module for module in self.blocks.modules() if isinstance(module, nn.Linear)]
        for other in others:
            other.weight, other.bias = first.weight, first.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x)


class TwoTowers(nn.Module):
    """Two stacks; the second one's layers also take the first one's output. The loss has auxiliary values."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(Block() for _ in range(2))
        self.right = nn.ModuleList(Block() for _ in range(2))
        self.cls = nn.Parameter(torch.full((1, WIDTH), 0.3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        left, right = x + self.cls, y * self.cls
        aux = []
        for block in self.left:
            left = block(left)
            aux.append(left.square().mean())
        for block in self.right:
            right = block(right + left)
            aux.append(right.abs().mean())
        return sum(aux) + torch.stack(aux).max(), aux


class Normalised(Base):
    """Weight norm, and spectral norm with buffers that a forward changes."""

    def __init__(self) -> None:
        super().__init__()
        for module in [module for module in self.blocks.modules() if isinstance(module, nn.Linear)]:
            nn.utils.parametrizations.weight_norm(module)
        nn.utils.parametrizations.spectral_norm(self.embedding)
        nn.utils.parametrizations.spectral_norm(self.head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x)


def in_place_operator() -> nn.Module:
    return CountsInForward("operator")


def assignment() -> nn.Module:
    return CountsInForward("assignment")

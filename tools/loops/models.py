"""Tiny models of float64 that the drawn scripts train, whole or with layers divided over tensor-parallel ranks."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from nxdpp import parallel_state
from nxdpp.parallel_layers import ColumnParallelLinear, RowParallelLinear

VOCABULARY = 12
WIDTH = 8
DRAWS = ("", "torch's", "the layer's", "the script's")
READS = ("", "", "", "training", "layer training", "head trained", "hidden trained", "gradients set")


@dataclass(frozen=True)
class Kind:
    """The properties of a drawn model.

    Attributes:
        layers: number of layers.
        tied: the head's weight is the embedding's.
        adapted: each layer has an adapter of rank 2 on a frozen weight.
        running: each layer has a running mean, which its training forward changes and uses.
        reads: the mode that the forward above the layers reads, one of ``READS``.
        weighted: the batch has a weight for each position, of shape (T,).
        floating: the batch has floats for each token, of shape (B, T, H).
        draws: whose generator gives random numbers, one of ``DRAWS``. With "the script's" no layer draws. With all
            three the program draws its batches from torch's generator. A generator of the layer's draws the same
            numbers in each replica, as under DDP, and one process has others: it is drawn without replicas.
        noise: factor of what a layer draws. It is 0 for numbers of torch's generator over stages and replicas, which
            have streams of their own.
    """

    layers: int = 4
    tied: bool = False
    adapted: bool = False
    running: bool = False
    reads: str = ""
    weighted: bool = False
    floating: bool = False
    draws: str = ""
    noise: float = 0.0


class Adapted(nn.Module):
    """A frozen module of one weight with an adapter of rank 2, which ``enabled`` switches."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        rows, columns = base.weight.shape
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(columns, 2, bias=False)
        self.up = nn.Linear(2, rows, bias=False)
        self.enabled = True

    @property
    def weight(self) -> torch.Tensor:
        """The weight of the module, as PEFT's adapters have it."""
        weight: torch.Tensor = self.base.weight
        return weight

    def forward(self, hidden: torch.Tensor) -> Any:
        result = self.base(hidden)
        return result + self.up(self.down(hidden)) if self.enabled else result


class Layer(nn.Module):
    """A layer of (B, T, H)."""

    mean: torch.Tensor

    def __init__(self, kind: Kind, divided: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up: nn.Module
        self.down: nn.Module
        if divided:
            self.up = ColumnParallelLinear(WIDTH, 2 * WIDTH, bias=False, gather_output=False)
            self.down = RowParallelLinear(2 * WIDTH, WIDTH, bias=False, input_is_parallel=True)
        else:
            self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
            self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.side = Adapted(nn.Linear(WIDTH, WIDTH, bias=False)) if kind.adapted else nn.Linear(WIDTH, WIDTH)
        self.factor = 1.0
        self.is_running = kind.running
        self.draws = kind.draws in ("torch's", "the layer's")
        self.noise = kind.noise
        self.generator = torch.Generator().manual_seed(1) if kind.draws == "the layer's" else None
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, hidden: torch.Tensor) -> Any:
        inner = self.norm(hidden)
        if self.draws:
            noise = torch.rand(inner.shape, dtype=inner.dtype, generator=self.generator)
            inner = inner + self.noise * noise
        if self.is_running:
            if self.training:
                self.mean.mul_(0.9).add_(inner.detach().mean((0, 1)), alpha=0.1)
            inner = inner - self.mean
        return hidden + self.factor * self.down(torch.tanh(self.up(inner))) + torch.tanh(self.side(inner))


class Model(nn.Module):
    """A language model of (B, T) tokens that returns its loss."""

    scale: torch.Tensor
    layers: Any

    def __init__(self, kind: Kind, divided: bool = False) -> None:
        super().__init__()
        self.factor = 1.0
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(kind, divided) for _ in range(kind.layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if kind.tied:
            self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(()))

    def forward(
        self,
        ids: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor | None = None,
        signal: torch.Tensor | None = None,
        is_mean: bool = True,
    ) -> Any:
        hidden = self.before_layers(ids)
        if signal is not None:
            hidden = hidden + signal
        for layer in self.layers:
            hidden = layer(hidden)
        hidden = self.norm(hidden) * self.scale * self.factor
        logits = self.logits(hidden).transpose(1, 2)
        losses = nn.functional.cross_entropy(logits, labels, reduction="none")
        if weights is not None:
            losses = losses * weights
        return {"loss": losses.mean() if is_mean else losses}

    def before_layers(self, ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embed(ids)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(hidden)
        return logits


class ReadsTraining(Model):
    def before_layers(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = super().before_layers(ids)
        return hidden if self.training else hidden * 2


class ReadsLayer(Model):
    def before_layers(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = super().before_layers(ids)
        return hidden if self.layers[0].training else hidden * 2


class ReadsHead(Model):
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().logits(hidden if self.head.weight.requires_grad else hidden * 2)


class ReadsHidden(Model):
    def before_layers(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = super().before_layers(ids)
        return hidden if hidden.requires_grad else hidden * 2


class SetsGradients(Model):
    def before_layers(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(self.embed.weight.requires_grad):
            return super().before_layers(ids)


# Code of forward that no other model has: what forward's code may ask is found in its source.
_READING: dict[str, type[Model]] = {
    "": Model,
    "training": ReadsTraining,
    "layer training": ReadsLayer,
    "head trained": ReadsHead,
    "hidden trained": ReadsHidden,
    "gradients set": SetsGradients,
}


def make(kind: Kind, divided: bool = False) -> Model:
    """Seed torch, and return the model with the same weights in every process; ``divided`` has this rank's part."""
    torch.manual_seed(0)
    whole = _READING[kind.reads](kind).double()
    if not divided:
        return whole
    with torch.random.fork_rng():
        result = _READING[kind.reads](kind, divided).double()
    values = whole.state_dict()
    with torch.no_grad():
        for name, parameter in result.named_parameters():
            parameter.copy_(part_like(values[name], parameter))
    return result


def part_like(values: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The part of ``values`` that ``tensor`` is of its whole; ``values`` themselves for a whole tensor."""
    if isinstance(tensor, DTensor):
        (replicas,), rows = tensor.device_mesh.shape, tensor.to_local()
        assert tensor.placements == (Shard(0),)
        parts = values.chunk(replicas)
        replica = tensor.device_mesh.get_local_rank()
        return parts[replica] if replica < len(parts) else rows.new_empty(rows.shape)
    if not is_divided(tensor):
        return values
    dimension: int = tensor.partition_dim  # type: ignore[attr-defined]  # set by the layer
    size = parallel_state.get_tensor_model_parallel_size()
    return values.chunk(size, dimension)[parallel_state.get_tensor_model_parallel_rank()]


def is_divided(tensor: torch.Tensor) -> bool:
    """Return whether this rank has a part of the tensor."""
    return bool(getattr(tensor, "tensor_model_parallel", False))


def batch(seed: int, rows: int, length: int, kind: Kind) -> dict[str, torch.Tensor]:
    """Tokens and labels of shape (rows, length), with what else ``kind`` takes."""
    generator = None if kind.draws else torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(0, VOCABULARY, (rows, length), generator=generator) for _ in range(2))
    result = {"ids": ids, "labels": labels}
    if kind.floating:
        result["signal"] = torch.randn(rows, length, WIDTH, generator=generator, dtype=torch.float64)
    if kind.weighted:
        result["weights"] = torch.rand(length, generator=generator, dtype=torch.float64)
    return result

"""Training scripts that change a model after it is wrapped, run in one process and by a pipeline."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nxdpp import NxDPPModel, parallel_state

VOCABULARY = 32
WIDTH = 16
LAYERS = 4
MICROBATCHES = 2


class Layer(nn.Module):
    """A layer of (B, T, H)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, hidden: torch.Tensor) -> Any:
        return hidden + self.norm(torch.tanh(self.linear(hidden)))


class Plain(nn.Module):
    """A language model of (B, T) tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss_of(self.after_layers(self.before_layers(ids)), labels)

    def before_layers(self, ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embed(ids)
        return hidden

    def after_layers(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        result: torch.Tensor = self.norm(hidden) * self.scale
        return result

    def loss_of(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class Adapted(nn.Module):
    """A linear layer with an adapter of rank 2."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        dtype = next(base.parameters()).dtype
        self.down, self.up = (
            nn.Linear(WIDTH, 2, bias=False, dtype=dtype),
            nn.Linear(2, VOCABULARY, bias=False, dtype=dtype),
        )

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.base(hidden) + self.up(self.down(hidden))


def batch(rows: int = 4) -> dict[str, torch.Tensor]:
    """Tokens of shape (rows, 6)."""
    generator = torch.Generator().manual_seed(5)
    ids, labels = (torch.randint(0, VOCABULARY, (rows, 6), generator=generator) for _ in range(2))
    return {"ids": ids, "labels": labels}


class Training:
    """Model, wrapped model and record of one script.

    Attributes:
        model: the user's module.
        wrapped: that the script lists parameters of.
        record: the losses, and other numbers that have to be those of one process.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.wrapped: Any = model
        self.record: list[float] = []

    def loss(self) -> float:
        """Run forward and backward of the batch."""
        parts = [
            dict(zip(batch(), each, strict=True)) for each in zip(*(v.chunk(2) for v in batch().values()), strict=True)
        ]
        losses = [self.model(**part) for part in parts]
        for loss in losses:
            (loss / len(losses)).backward()
        return torch.stack(losses).mean().item()

    def steps(self, number: int, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Make steps of ``optimizer``, by default a new AdamW of all parameters."""
        optimizer = optimizer or torch.optim.AdamW(self.wrapped.parameters(), lr=1e-2)
        for _ in range(number):
            self.record.append(self.loss())
            optimizer.step()
            optimizer.zero_grad()


class PipelinedTraining(Training):
    """The same over the ranks of a pipeline, with ``settings`` of the wrapped model."""

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        super().__init__(model)
        self.wrapped = NxDPPModel(model, transformer_layer_cls=Layer, num_microbatches=MICROBATCHES, **settings)

    def loss(self) -> float:
        loss = self.wrapped.run_train(**batch())
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, None if loss is None else loss.item())
        # With some schedules another rank than the last one has the last stage.
        return float(next(each for each in everyones if each is not None))


Script = Callable[[Training], object]


def compare(
    rank: int, world_size: int, scripts: Mapping[str, tuple[Callable[[], nn.Module], Script]], **settings: Any
) -> dict[str, Any]:
    """Run each script in one process and by a pipeline of all ranks; return the numbers of both by its name.

    The pipeline has the ``settings`` of a wrapped model.
    """
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world_size)
    compared = {}
    for name, (make, script) in scripts.items():
        numbers = []
        for is_alone in (True, False):
            torch.manual_seed(0)
            training = Training(make()) if is_alone else PipelinedTraining(make(), **settings)
            script(training)
            numbers.append(training.record)
        compared[name] = tuple(numbers)
    return compared

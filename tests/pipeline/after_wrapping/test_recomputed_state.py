"""Layers that are recomputed, and whose output depends on what each call changes."""

import random
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nxdpp import apply_checkpoint
from nxdpp.pipeline.local.changes import ChangeRecord
from nxdpp.pipeline.torch_checkpoints import follow_checkpoints
from tests.pipeline.after_wrapping.scripts import (
    LAYERS,
    WIDTH,
    Layer,
    PipelinedTraining,
    Plain,
    Script,
    Training,
    compare,
)
from tests.pipeline.test_activation_checkpoint import wrapped_layer
from tests.support.run_ranks import run_ranks


class RunningMean(Layer):
    """Subtracts a mean of all calls, a buffer that it replaces or changes in place."""

    mean: torch.Tensor

    def __init__(self, in_place: bool = True) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, hidden: torch.Tensor) -> Any:
        output = super().forward(hidden - self.mean)
        new = hidden.detach().mean((0, 1))
        if self.in_place:
            self.mean.lerp_(new, 0.5)
        else:
            self.mean = self.mean.lerp(new, 0.5)
        return output


class Nested(RunningMean):
    """Recomputes itself where a script asks for it."""

    def __init__(self, use_reentrant: bool, in_place: bool) -> None:
        super().__init__(in_place)
        self.use_reentrant = use_reentrant
        self.is_recomputed = False

    def forward(self, hidden: torch.Tensor) -> Any:
        if self.is_recomputed:
            return checkpoint(super().forward, hidden, use_reentrant=self.use_reentrant)
        return super().forward(hidden)


class Counting(Layer):
    """Counts its calls in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = [0]

    def forward(self, hidden: torch.Tensor) -> Any:
        output = super().forward(hidden) / (1 + 0.5 * self.calls[0])
        self.calls[0] += 1
        return output


class Drawing(Layer):
    """Draws from Python's generator."""

    def forward(self, hidden: torch.Tensor) -> Any:
        return super().forward(hidden) * (1 + random.random())


def of(make: Callable[[], nn.Module], layers: range = range(LAYERS)) -> Callable[[], nn.Module]:
    """A constructor of the model with some layers from ``make``."""

    def model() -> nn.Module:
        random.seed(0)
        plain = Plain()
        for number in layers:
            plain.layers[number] = make()
        return plain

    return model


def recomputed(steps: int, *names: str) -> Script:
    """A script whose pipeline recomputes layers, by default all. It ends with a step in evaluation mode."""

    def script(training: Training) -> None:
        if training.wrapped is not training.model:
            for layer in training.model.layers:  # type: ignore[union-attr]
                vars(layer).update(is_recomputed=True)
            apply_checkpoint(training.wrapped, list(names) or None)
        training.steps(steps)
        training.wrapped.eval()
        training.steps(1)

    return script


SCRIPTS: dict[str, Any] = {
    "running mean": (of(RunningMean), recomputed(2)),
    "counter in a list": (of(Counting), recomputed(2)),
    "nested, reentrant": (of(lambda: Nested(use_reentrant=True, in_place=True)), recomputed(2)),
}
SCRIPTS_OF_REMEDIES: dict[str, Any] = {
    "draws": (of(Drawing, range(1)), recomputed(2, "layers.1", "layers.2", "layers.3")),
}


def compared(rank: int) -> dict[str, Any]:
    return compare(rank, 2, SCRIPTS)


def test_a_recomputation_has_the_state_of_its_forward() -> None:
    for found in run_ranks(2, compared):
        for name, (expected, numbers) in found.items():
            assert numbers == expected, name
            assert len(set(expected)) == len(expected)


def refused(rank: int) -> None:
    for name, (expected, numbers) in compare(rank, 2, SCRIPTS_OF_REMEDIES).items():
        assert numbers == expected, name
    training = PipelinedTraining(of(Drawing, range(1))())
    recomputed(2)(training)


def test_other_state_is_refused_on_all_ranks_and_the_remedy_works() -> None:
    with pytest.raises(AssertionError) as raised:
        run_ranks(2, refused)
    message = str(raised.value)
    assert "RuntimeError: layers.0 has a different output in its recomputation than in its forward" in message
    assert "Keep the activations of layers.0" in message
    assert "failure, rank 0 first" in message


def test_a_checkpoint_of_its_own_is_refused_where_later_forwards_come_first() -> None:
    layer, record = Nested(use_reentrant=False, in_place=False), ChangeRecord()
    record.follow(layer, [])
    follow_checkpoints()
    layer.is_recomputed = True
    losses = (layer(torch.ones(1, 2, WIDTH, requires_grad=True)).sum() for _ in range(6))
    for _ in range(3):
        next(losses).backward()
    fourth, _ = next(losses), next(losses)
    with pytest.raises(RuntimeError, match=r"Nested computes its forward again .* later microbatches .* buffer mean;"):
        fourth.backward()
    # What the message advises.
    layer.is_recomputed = False
    apply_checkpoint(cast(Any, wrapped_layer(layer)))
    sixth, _ = next(losses), layer(torch.ones(1, 2, WIDTH, requires_grad=True))
    sixth.backward()

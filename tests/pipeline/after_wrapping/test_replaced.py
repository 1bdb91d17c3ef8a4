"""Modules, parameters and buffers that a script replaces or adds after wrapping, by the same line on every rank."""

from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import parallel_state
from tests.pipeline.after_wrapping.scripts import (
    VOCABULARY,
    WIDTH,
    Adapted,
    Layer,
    PipelinedTraining,
    Plain,
    Script,
    batch,
    compare,
)
from tests.pipeline.after_wrapping.scripts import Training as Training
from tests.support.kept_messages import KeptMessages
from tests.support.run_ranks import run_ranks


class Open(Plain):
    """Its forward uses what a script may add."""

    adapter: Any

    def __init__(self) -> None:
        super().__init__()
        self.activation: nn.Module = nn.Tanh()
        self.shift: nn.Parameter | None
        self.register_parameter("shift", None)

    def after_layers(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = super().after_layers(hidden)
        if self.shift is not None:
            hidden = hidden + self.shift
        if hasattr(self, "adapter"):
            hidden = self.adapter(hidden)
        result: torch.Tensor = self.activation(hidden)
        return result


class Scaled(nn.Linear):
    """A head with a factor of its own, which code above the layers reads."""

    def __init__(self, factor: float) -> None:
        super().__init__(WIDTH, VOCABULARY, bias=False)
        self.factor = factor


class ReadsHead(Plain):
    """Its code reads a factor of the head, and whether its weight is trained."""

    head: Any

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.head = Scaled(factor)

    def loss_of(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = hidden * getattr(self.head, "factor", 3.0)
        return super().loss_of(hidden if self.head.weight.requires_grad else hidden * 2, labels)


def other_factors(training: Training) -> None:
    training.steps(1)
    training.model.head = Scaled(3.0)
    training.steps(2)
    training.model.head.factor = 5.0
    training.steps(2)


def after_steps(change: Any, steps: int = 1) -> Script:
    """A script that changes its model after ``steps``, and makes a new optimizer."""

    def script(training: Training) -> None:
        if steps:
            training.steps(steps)
        change(training.model)
        training.steps(2)

    return script


def old_optimizer(training: Training) -> None:
    optimizer = torch.optim.AdamW(training.wrapped.parameters(), lr=1e-2)
    training.steps(2, optimizer)
    training.model.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    training.steps(2, optimizer)


def buffer_and_state(training: Training) -> None:
    training.steps(1)
    training.model.scale = torch.tensor(2.0)
    training.record.append(training.wrapped.state_dict()["scale"].item())
    training.steps(2)
    training.record.append(dict(training.wrapped.named_buffers())["scale"].item())


def replace(name: str, make: Any) -> Any:
    return lambda model: model.set_submodule(name, make())


def head() -> nn.Module:
    return nn.Linear(WIDTH, VOCABULARY, bias=False)


def layer_of_one_rank(training: Training) -> None:
    """The weights of a new layer take no memory on the other rank, and follow a conversion where they are."""
    after_steps(replace("layers.3", Layer))(training)
    if isinstance(training, PipelinedTraining):
        weight = training.model.get_parameter("layers.3.linear.weight")
        assert weight.is_meta == (parallel_state.get_pipeline_model_parallel_rank() == 0)
        training.wrapped.double()
        is_here = training.model.get_parameter("layers.3.linear.weight").dtype is torch.float64
        assert is_here != weight.is_meta


SCRIPTS: dict[str, Any] = {
    "head before the first step": (Plain, after_steps(replace("head", head), 0)),
    "adapter around the head": (
        Plain,
        after_steps(lambda model: setattr(model, "head", Adapted(model.head.requires_grad_(False)))),
    ),
    "layer": (Plain, layer_of_one_rank),
    "part of a layer": (Plain, after_steps(replace("layers.0.linear", lambda: nn.Linear(WIDTH, WIDTH)))),
    "larger embedding": (Plain, after_steps(replace("embed", lambda: nn.Embedding(VOCABULARY + 8, WIDTH)))),
    "weight": (
        Plain,
        after_steps(lambda model: setattr(model.head, "weight", nn.Parameter(torch.randn(VOCABULARY, WIDTH)))),
    ),
    "module without parameters": (Open, after_steps(replace("activation", nn.GELU))),
    "buffer": (Plain, buffer_and_state),
    "head, and the old optimizer": (Plain, old_optimizer),
    "head with an attribute that forward reads": (ReadsHead, other_factors),
}


def compared(rank: int) -> dict[str, Any]:
    return compare(rank, 2, SCRIPTS)


def test_losses_are_those_of_one_process() -> None:
    for result in run_ranks(2, compared):
        for name, (alone, pipelined) in result.items():
            assert pipelined == alone, name


def warned_of() -> list[str]:
    messages = KeptMessages("that the program has replaced").texts
    training = PipelinedTraining(Plain())
    after_steps(replace("head", head))(training)
    optimizer = torch.optim.AdamW(training.wrapped.parameters(), lr=1e-2)
    own = training.model.head
    for module in (head(), own):
        training.model.head = module
        # The listing follows the change, and the old parameter is noted.
        assert list(training.wrapped.parameters())
    training.steps(1, optimizer)
    assert not messages
    old_optimizer(training)
    return messages


def state_of_one_process() -> list[str]:
    """Load the whole state dict of one process after the head has an adapter; return what a call of the head says."""
    alone, training = Plain(), PipelinedTraining(Plain())
    alone.head = Adapted(alone.head)  # type: ignore[assignment]  # declared as a Linear
    training.model.head = Adapted(training.model.get_submodule("head"))
    training.wrapped.load_state_dict(alone.state_dict())
    for name, value in training.wrapped.state_dict().items():
        assert torch.equal(value, alone.state_dict()[name]), name
    if parallel_state.get_pipeline_model_parallel_rank() == 1:
        return []
    found = []
    for use in (training.model.head.state_dict, lambda: training.model.head(torch.ones(1, WIDTH))):
        with pytest.raises(RuntimeError) as raised:
            use()
        found.append(str(raised.value))
    return found


CHANGES: dict[str, Any] = {
    "adapter": lambda model: model.add_module("adapter", nn.Linear(WIDTH, WIDTH)),
    "layers.4": lambda model: model.layers.append(Layer()),
    "activation": lambda model: model.set_submodule("activation", nn.PReLU()),
    "shift": lambda model: model.register_parameter("shift", nn.Parameter(torch.ones(WIDTH))),
}


def refused(change: Any) -> str:
    training = PipelinedTraining(Open())
    training.steps(1)
    change(training.model)
    with pytest.raises(RuntimeError) as raised:
        training.wrapped.run_train(**batch())
    return str(raised.value)


def told(rank: int) -> tuple[list[str], list[str], list[str]]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    torch.manual_seed(0)
    return warned_of(), state_of_one_process(), [refused(change) for change in CHANGES.values()]


def test_what_cannot_run_is_told() -> None:
    first, last = run_ranks(2, told)
    # An old optimizer is told of once.
    assert not first[0]
    (message,) = last[0]
    assert "AdamW, holds 1 parameter that the program has replaced in the model (head.weight is the first)" in message
    # The names of an adapter are known on every rank.
    assert not last[1]
    state, call = first[1]
    assert "another rank holds base.weight, and a state dict of the module" in state
    assert "head (Adapted) is called on a rank that has no values of it" in call
    assert "head is on pipeline rank 1" in call
    for *_, new_parameters in (first, last):
        for name, message in zip(CHANGES, new_parameters, strict=True):
            assert message.startswith(f"{name} has parameters, and nothing of that name had any"), message
            assert "Add it before NxDPPModel(module)." in message

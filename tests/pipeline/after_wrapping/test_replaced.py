"""Modules, parameters and buffers that a script replaces or adds after wrapping, by the same line on every rank."""

import logging
from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import parallel_state
from tests.pipeline.after_wrapping.scripts import (
    VOCABULARY,
    WIDTH,
    Layer,
    PipelinedTraining,
    Plain,
    Script,
    batch,
    compare,
)
from tests.pipeline.after_wrapping.scripts import Training as Training
from tests.support.run_ranks import run_ranks


class Open(Plain):
    """Its forward uses what a script may add."""

    adapter: Any
    factor: Any

    def __init__(self) -> None:
        super().__init__()
        self.activation: nn.Module = nn.Tanh()
        self.shift: nn.Parameter | None
        self.register_parameter("shift", None)
        self.more = nn.ModuleList()
        self.named = nn.ModuleDict()

    def after_layers(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = super().after_layers(hidden)
        if self.shift is not None:
            hidden = hidden + self.shift
        for module in (*self.more, *self.named.values()):
            hidden = module(hidden)
        if hasattr(self, "adapter"):
            hidden = self.adapter(hidden)
        if hasattr(self, "factor"):
            hidden = hidden * self.factor
        result: torch.Tensor = self.activation(hidden)
        return result


class Adapted(nn.Module):
    """A linear layer with an adapter of rank 2."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, VOCABULARY, bias=False)

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.base(hidden) + self.up(self.down(hidden))


class Scaled(nn.Linear):
    """A head with a factor of its own, which code above the layers reads."""

    def __init__(self, factor: float) -> None:
        super().__init__(WIDTH, VOCABULARY, bias=False)
        self.factor = factor

    def scale_of(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.factor


class OtherScaled(Scaled):
    def scale_of(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.factor * 2


class Shown(Adapted):
    """An adapter that shows the weight of its layer, as PEFT's do."""

    @property
    def weight(self) -> Any:
        return self.base.weight


class ReadsHead(Plain):
    """Its code reads a factor of the head, and whether its weight is trained."""

    head: Any

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.head = Scaled(factor)

    def loss_of(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = hidden * getattr(self.head, "factor", 3.0)
        return super().loss_of(hidden if self.head.weight.requires_grad else hidden * 2, labels)


class CallsHead(ReadsHead):
    """Its code calls a method of the head."""

    def loss_of(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().loss_of(self.head.scale_of(hidden), labels)


def other_factors(training: Training) -> None:
    training.steps(1)
    training.model.head = Scaled(3.0)
    training.steps(2)
    training.model.head.factor = 5.0
    training.steps(2)


def shown_weight(training: Training) -> None:
    training.steps(1)
    training.model.head = Shown(training.model.get_submodule("head"))
    training.steps(2)
    training.model.head.base.requires_grad_(True)
    training.steps(2)


def after_steps(change: Any, steps: int = 2) -> Script:
    """A script that changes its model after ``steps``, and makes a new optimizer."""

    def script(training: Training) -> None:
        if steps:
            training.steps(steps)
        change(training.model)
        training.steps(3)

    return script


def old_optimizer(training: Training) -> None:
    optimizer = torch.optim.AdamW(training.wrapped.parameters(), lr=1e-2)
    training.steps(2, optimizer)
    training.model.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    training.steps(3, optimizer)


def buffer_and_state(training: Training) -> None:
    training.steps(1)
    training.model.scale = torch.tensor(2.0)
    training.record.append(training.wrapped.state_dict()["scale"].item())
    training.steps(2)
    training.record.append(dict(training.wrapped.named_buffers())["scale"].item())


def add_buffer(model: nn.Module) -> None:
    model.register_buffer("factor", torch.tensor(2.0))


def replace(name: str, make: Any) -> Any:
    return lambda model: model.set_submodule(name, make())


def head() -> nn.Module:
    return nn.Linear(WIDTH, VOCABULARY, bias=False)


SCRIPTS: dict[str, Any] = {
    "head": (Plain, after_steps(replace("head", head))),
    "head before the first step": (Plain, after_steps(replace("head", head), 0)),
    "adapter around the head": (Plain, after_steps(lambda model: setattr(model, "head", Adapted(model.head)))),
    "layer": (Plain, after_steps(replace("layers.3", Layer))),
    "part of a layer": (Plain, after_steps(replace("layers.0.linear", lambda: nn.Linear(WIDTH, WIDTH)))),
    "norm": (Plain, after_steps(replace("norm", lambda: nn.LayerNorm(WIDTH, eps=0.5)))),
    "larger embedding": (Plain, after_steps(replace("embed", lambda: nn.Embedding(VOCABULARY + 8, WIDTH)))),
    "weight": (
        Plain,
        after_steps(lambda model: setattr(model.head, "weight", nn.Parameter(torch.randn(VOCABULARY, WIDTH)))),
    ),
    "module without parameters": (Open, after_steps(replace("activation", nn.GELU))),
    "module without parameters, added": (Open, after_steps(lambda model: model.add_module("adapter", nn.ReLU()))),
    "buffer, added": (Open, after_steps(add_buffer)),
    "buffer": (Plain, buffer_and_state),
    "head, and the old optimizer": (Plain, old_optimizer),
    "head with an attribute that forward reads": (ReadsHead, other_factors),
    "head with an attribute that forward reads, before the first step": (
        ReadsHead,
        after_steps(replace("head", lambda: Scaled(3.0)), 0),
    ),
    "head with a method that forward calls": (CallsHead, after_steps(replace("head", lambda: Scaled(3.0)))),
    "adapter that shows its weight": (ReadsHead, shown_weight),
}


def method_of_another_class(rank: int) -> str:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    training = PipelinedTraining(CallsHead())
    training.steps(1)
    training.model.head = OtherScaled(3.0)
    try:
        training.steps(1)
    except RuntimeError as error:
        return str(error)
    return "not refused"


def test_another_method_that_forward_calls_is_refused() -> None:
    for error in run_ranks(2, method_of_another_class):
        assert error.startswith(
            "a module was replaced after the model was wrapped, and forward reads the attribute scale_of of a module: "
            "OtherScaled has another one than Scaled, which the graph was made with. Replace the module before"
        )


def replaced_before(rank: int) -> tuple[list[float], list[float]]:
    """The remedy."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    records = []
    for made in (Training, PipelinedTraining):
        torch.manual_seed(0)
        model = CallsHead()
        model.head = OtherScaled(3.0)
        training = made(model)
        training.steps(2)
        records.append(training.record)
    return records[0], records[1]


def test_a_method_that_was_replaced_before_wrapping_is_called() -> None:
    for alone, pipelined in run_ranks(2, replaced_before):
        assert pipelined == alone


def compared(rank: int, world_size: int) -> dict[str, Any]:
    return compare(rank, world_size, SCRIPTS)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_losses_are_those_of_one_process(world_size: int) -> None:
    for result in run_ranks(world_size, compared, world_size):
        for name, (alone, pipelined) in result.items():
            assert pipelined == alone, name


def warned_of(rank: int) -> list[str]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("nxdpp.gradients.replaced_parameters").addHandler(handler)
    torch.manual_seed(0)
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


def test_an_old_optimizer_is_told_of_once() -> None:
    first, last = run_ranks(2, warned_of)
    assert not first
    (message,) = last
    assert "AdamW, holds 1 parameter that the program has replaced in the model (head.weight is the first)" in message


def state_of_one_process(rank: int) -> list[str]:
    """Load the whole state dict of one process after the head has an adapter; return what a call of the head says."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=3)
    alone, training = Plain(), PipelinedTraining(Plain())
    alone.head = Adapted(alone.head)  # type: ignore[assignment]  # declared as a Linear
    training.model.head = Adapted(training.model.get_submodule("head"))
    training.wrapped.load_state_dict(alone.state_dict())
    for name, value in training.wrapped.state_dict().items():
        assert torch.equal(value, alone.state_dict()[name]), name
    if rank == 2:
        return []
    found = []
    for use in (training.model.head.state_dict, lambda: training.model.head(torch.ones(1, WIDTH))):
        with pytest.raises(RuntimeError) as raised:
            use()
        found.append(str(raised.value))
    return found


def test_the_names_of_an_adapter_are_known_on_every_rank() -> None:
    *others, last = run_ranks(3, state_of_one_process)
    assert not last
    for state, call in others:
        assert "another rank holds base.weight, and a state dict of the module" in state
        assert "head (Adapted) is called on a rank that has no values of it" in call
        assert "head is on pipeline rank 2" in call


def refused(rank: int, changes: list[str]) -> list[str]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    found = []
    for change in changes:
        torch.manual_seed(0)
        training = PipelinedTraining(Open())
        training.steps(1)
        CHANGES[change](training.model)
        with pytest.raises(RuntimeError) as raised:
            training.wrapped.run_train(**batch())
        found.append(str(raised.value))
    return found


CHANGES: dict[str, Any] = {
    "adapter": lambda model: model.add_module("adapter", nn.Linear(WIDTH, WIDTH)),
    "layers.4": lambda model: model.layers.append(Layer()),
    "activation": lambda model: model.set_submodule("activation", nn.PReLU()),
    "more": lambda model: model.more.extend([nn.Linear(WIDTH, WIDTH)]),
    "named": lambda model: model.named.update({"one": nn.Linear(WIDTH, WIDTH)}),
    "shift": lambda model: model.register_parameter("shift", nn.Parameter(torch.ones(WIDTH))),
}


def test_new_parameters_above_the_layers_are_refused_on_all_ranks() -> None:
    for messages in run_ranks(2, refused, list(CHANGES)):
        for name, message in zip(CHANGES, messages, strict=True):
            assert message.startswith(f"{name} has parameters, and nothing of that name had any"), message
            assert "Add it before NxDPPModel(module)." in message

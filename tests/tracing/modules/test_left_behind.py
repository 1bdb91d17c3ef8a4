"""Attributes that layers leave behind are values of the graph, with gradients, over every stage."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from nxdpp.pipeline.activation_checkpoint import _checkpoint
from tests.support.in_process import InProcessPipeline

WIDTH = 4


class Layer(nn.Module):
    """Leave the mean square of the product behind, as ``aux``."""

    aux: Any

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.aux = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.leave(y)
        return x + torch.tanh(y)

    def leave(self, y: Tensor) -> None:
        self.aux = y.pow(2).mean()


class Model(nn.Module):
    """Four layers and a loss to which a subclass adds what the layers leave behind."""

    layers: Any

    def __init__(self, layer: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)

    def begin(self, x: Tensor) -> None: ...

    def forward(self, x: Tensor) -> Any:
        self.begin(x)
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).pow(2).mean() + 0.1 * self.auxiliary()

    def auxiliary(self) -> Any:
        return sum(layer.aux for layer in self.layers)


def check_exact(model: nn.Module, stages: int = 3, layer: str = "Layer", checkpointed: bool = False) -> None:
    """Compare losses and gradients of two steps of two microbatches with one process, bit for bit."""
    whole = copy.deepcopy(model)
    pipeline = InProcessPipeline(model, stages, transformer_layer_cls=layer)
    if checkpointed:
        for name in pipeline.partition.layers:
            _checkpoint(name, model.get_submodule(name))
    for seed in (1, 2):
        torch.manual_seed(seed)
        inputs = torch.randn(4, WIDTH)
        expected = []
        for part in inputs.chunk(2):
            loss = whole(part)
            (loss / 2).backward()
            expected.append(loss.detach())
        losses = pipeline.train({"x": inputs}, 2)
        assert [loss.item() for loss in losses] == [loss.item() for loss in expected]
    for (name, parameter), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(gradient_of(parameter), gradient_of(other)), name


def gradient_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def test_an_attribute_of_each_layer_is_added_to_the_loss() -> None:
    check_exact(Model(), checkpointed=True)


class Gate(nn.Module):
    """Gate without parameters; leaves its loss behind under several names."""

    def forward(self, y: Tensor) -> Tensor:
        setattr(self, "by_name", y.softmax(-1).pow(2).sum(-1).mean())  # noqa: B010
        self.pair = (y.mean(), [y.abs().mean()])
        return y.softmax(-1)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate: Any = Gate()

    def forward(self, y: Tensor) -> Tensor:
        return self.gate(y) * y  # type: ignore[no-any-return]


class Nested(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.moe = Mixture()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.moe(self.linear(x))
        self.moe.gate.other = y.mean()
        return x + y


def keeping(forward: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    @functools.wraps(forward)
    def call(self: Any, x: Tensor) -> Tensor:
        self.decorated = x.abs().mean()
        return forward(self, x)

    return call


class Leaving(Nested):
    """Leave attributes behind in all ways."""

    late: Any

    def __init__(self) -> None:
        super().__init__()
        self.late = None

    @keeping
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.late = y.pow(2).mean()
        self.made = y.mean()
        leave_on(self, y)
        for part in ("a", "b"):
            setattr(self, f"aux_{part}", y.pow(2).mean())
        return super().forward(x)

    def get_aux(self) -> Any:
        return self.aux

    @property
    def doubled(self) -> Any:
        return self.get_aux() * 2


def leave_on(module: Any, y: Tensor) -> None:
    module.aux = y.abs().mean()


def by_hook(module: Any, args: Any, output: Tensor) -> None:
    module.by_hook = output.pow(2).mean()


class Reading(Model):
    """Read what layers leave behind in all ways."""

    def __init__(self) -> None:
        super().__init__(Leaving)
        for layer in self.layers:
            layer.register_forward_hook(by_hook)

    def auxiliary(self) -> Any:
        total: Any = 0
        for layer in self.layers:
            if layer.late is not None:
                total = total + layer.late
            first, (second,) = layer.moe.gate.pair
            total = total + layer.get_aux() + layer.doubled + layer.aux_a * layer.aux_b + first * second
            total = total + layer.by_hook + layer.moe.gate.other + layer.decorated
        name = "by_name"
        total = total + sum(getattr(m, name) for m in self.modules() if hasattr(m, name))
        modules: list[Any] = list(self.modules())
        return total + sum(m.made for m in modules if hasattr(m, "made"))


def test_attributes_that_are_left_behind_in_all_ways() -> None:
    check_exact(Reading(), layer="Leaving")


def test_layers_in_a_wrapper_that_passes_attributes_on() -> None:
    model = Model()
    for i in range(4):
        model.layers[i] = checkpoint_wrapper(model.layers[i])
    check_exact(model)


def test_an_attribute_that_is_read_between_layers() -> None:
    class Between(Model):
        def forward(self, x: Tensor) -> Any:
            x = self.embedding(x)
            total = torch.zeros(())
            for layer in self.layers:
                x = layer(x) * (1 + layer.aux)
                total = total + layer.aux
            return self.head(x).pow(2).mean() + total

    check_exact(Between())

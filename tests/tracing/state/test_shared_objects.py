"""Tensors that layers of several stages share are refused where a layer changes them, and are exact otherwise."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.exact import assert_exact
from tests.support.in_process import InProcessPipeline

STORE: dict[Any, Any] = {}
FEATURES: list[Tensor] = []
WARNED = False


@pytest.fixture(autouse=True)
def _empty() -> None:
    STORE.clear()
    FEATURES.clear()
    ReadsItsClass.cache = None


class Layer(nn.Module):
    """Tells the places of what it shares with the next layers."""

    number: int
    context: Any
    memory: Any

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        total: Tensor = y + self.use(y)
        return total

    def use(self, y: Tensor) -> Any:
        return 0.0


class ReadsThePrevious(Layer):
    out: Any = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.previous: list[ReadsThePrevious] = []

    def use(self, y: Tensor) -> Any:
        self.out = y
        return self.previous[0].out if self.previous else 0.0


class ReadsAContext(Layer):
    def use(self, y: Tensor) -> Any:
        if self.number == 0:
            self.context.value = y
        return 0.0 if self.context.value is None else self.context.value


class ReadsAGlobal(Layer):
    def use(self, y: Tensor) -> Any:
        if self.number == 0:
            STORE["first"] = y
        return STORE.get("first", 0.0)


class ReadsItsClass(Layer):
    cache: Any = None

    def use(self, y: Tensor) -> Any:
        if ReadsItsClass.cache is None:
            ReadsItsClass.cache = y.detach().mean()
        return ReadsItsClass.cache


class ChangesData(Layer):
    def use(self, y: Tensor) -> Any:
        self.memory[0].data.mul_(0.5).add_(y.detach().mean(0))
        return self.memory[0].clone()


class ChangesABuffer(Layer):
    memory: Tensor

    def use(self, y: Tensor) -> Any:
        with torch.no_grad():
            self.memory.mul_(0.5).add_(y.detach().mean(0))
        return self.memory.clone()


class ReadsANumber(Layer):
    def use(self, y: Tensor) -> Any:
        if self.number == 0:
            self.context.scale = float(y.mean()) + 2.0
        return self.context.scale


class CountsAndReads(Layer):
    def use(self, y: Tensor) -> Any:
        self.context.calls += 1
        return 0.0 if self.context.calls < 3 else 1.0


class ReadsComputedKeys(Layer):
    def use(self, y: Tensor) -> Any:
        STORE[f"out{self.number}"] = y
        return STORE.get(f"out{self.number - 1}", 0.0)


class ReadsAllItems(Layer):
    def use(self, y: Tensor) -> Any:
        FEATURES.append(y)
        return sum(FEATURES)


class Model(nn.Module):
    """Layers with what ``share`` gives them; ``more`` are the classes of the last three, by default ``layer``."""

    def __init__(self, layer: type[Layer], share: Callable[[Any], Any], more: Sequence[type[Layer]] = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(each() for each in (layer, *(more or [layer] * 3)))
        for number, module in enumerate(self.layers):
            vars(module)["number"] = number
        share(self.layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def previous(layers: Any) -> None:
    for before, layer in pairwise(layers):
        layer.previous = [before]


def one(make: Callable[[], Any], name: str = "context") -> Callable[[Any], None]:
    def share(layers: Any) -> None:
        value = make()
        for layer in layers:
            vars(layer)[name] = value

    return share


def buffer(layers: Any) -> None:
    memory = torch.zeros(4)
    for layer in layers:
        layer.register_buffer("memory", memory)


def nothing(layers: Any) -> None:
    pass


CASES: dict[str, tuple[type[Layer], Callable[[Any], None], str]] = {
    "layer before": (ReadsThePrevious, previous, r"layers\.[12].*\.out"),
    "object": (ReadsAContext, one(lambda: SimpleNamespace(value=None)), r"context\.value"),
    "global": (ReadsAGlobal, nothing, r"test_shared_objects\.STORE\['first'\]"),
    "class": (ReadsItsClass, nothing, r"ReadsItsClass\.cache"),
    "data of a tensor": (ChangesData, one(lambda: [torch.zeros(4)], "memory"), r"memory\[0\]"),
    "number": (ReadsANumber, one(lambda: SimpleNamespace(scale=1.0)), r"context\.scale"),
    "counter": (CountsAndReads, one(lambda: SimpleNamespace(calls=0)), r"context\.calls"),
    "computed keys": (ReadsComputedKeys, nothing, r"STORE\['out0'\]"),
    "all items": (ReadsAllItems, nothing, r"FEATURES\[0\]"),
    "buffer": (ChangesABuffer, buffer, r"layers\.\d\.memory"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_changed_tensor_that_other_stages_read_is_refused(case: str) -> None:
    layer, share, path = CASES[case]
    model = Model(layer, share)
    pipeline = InProcessPipeline(model, 2, {"x": torch.randn(2, 4)}, transformer_layer_cls=layer)
    with pytest.raises(
        RuntimeError, match=rf"(?s)layers\.[01] \(\w+\) changes the (tensor|value) .*{path}.* Return the value"
    ):
        pipeline.train({"x": torch.randn(4, 4)}, 2, backward=case != "object")
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("case", ["object", "layer before"])
def test_layers_of_one_stage_may_share(case: str) -> None:
    layer, share, _ = CASES[case]

    def share_in_pairs(layers: Any) -> None:
        share(layers[:2])
        share(layers[2:])
        for position in (0, 2):
            layers[position].number = 0

    assert_exact(Model(layer, share_in_pairs), {"x": torch.randn(4, 4)}, layer)


class FillsATable(Layer):
    def use(self, y: Tensor) -> Any:
        if self.context.value is None:
            self.context.value = torch.arange(4.0)
        return self.context.value


def test_a_table_is_exact_once_it_is_filled() -> None:
    share = one(lambda: SimpleNamespace(value=None))
    x = torch.randn(4, 4)
    pipeline = InProcessPipeline(
        Model(FillsATable, share), 2, {"x": torch.randn(2, 4)}, transformer_layer_cls=FillsATable
    )
    with pytest.raises(RuntimeError, match="run the model once before wrapping it"):
        pipeline.train({"x": x}, 2)
    model = Model(FillsATable, share)
    model(x)
    assert_exact(model, {"x": x}, FillsATable)


class Collects(Layer):
    def use(self, y: Tensor) -> Any:
        FEATURES.append(y.detach())
        STORE[self.number] = y.detach()
        STORE["last"] = y.detach()
        self.context.last = y.detach()
        self.own = y.detach()
        return self.own * 2.0


def test_tensors_that_layers_alone_store_are_not_refused() -> None:
    model = Model(Collects, one(SimpleNamespace))
    for layer in model.layers:
        layer.register_forward_hook(lambda module, inputs, output: STORE.update(hook=output.detach()))
    assert_exact(model, {"x": torch.randn(4, 4)}, Collects)
    assert FEATURES


class SetsFirst(Layer):
    """Shares numbers that each layer sets before it reads them."""

    def use(self, y: Tensor) -> Any:
        self.context.scale = 1.0 + self.number
        self.context.items["scale"] = 1.0 + self.number
        STORE[self.number] = y
        return self.scaled(y) * STORE[self.number]

    def scaled(self, y: Tensor) -> Any:
        return y * self.context.scale + self.context.items["scale"]


class Logs(Layer):
    """Shares counters that decide about a log alone."""

    def use(self, y: Tensor) -> Any:
        global WARNED
        self.context.calls += 1
        if not WARNED:
            print("layers run")
            WARNED = True
        if self.context.calls % 100 == 0:
            print(f"{self.context.calls} calls")
        print("calls", self.context.calls)
        return 0.0


class OwnNumbers(Layer):
    """Has an attribute of the name of a shared one."""

    scale = 2.0

    def use(self, y: Tensor) -> Any:
        self.context.scale = float(self.number)
        return y * self.scale


def test_numbers_that_no_other_stage_needs_are_not_refused() -> None:
    share = one(lambda: SimpleNamespace(scale=1.0, calls=0, items={}))
    layers = [SetsFirst, Logs, OwnNumbers]
    assert_exact(Model(SetsFirst, share, layers), {"x": torch.randn(4, 4)}, layers)

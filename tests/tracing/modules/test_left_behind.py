"""Attributes that layers leave behind are values of the graph, with gradients, over every stage."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from nxdpp.pipeline.activation_checkpoint import _checkpoint
from nxdpp.tracing.graph.errors import TracingError
from tests.support.in_process import InProcessPipeline
from tests.support.traced_models import PlainLayer

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


@pytest.mark.parametrize("checkpointed", [False, True])
def test_an_attribute_of_each_layer_is_added_to_the_loss(checkpointed: bool) -> None:
    check_exact(Model(), checkpointed=checkpointed)


def test_an_attribute_that_is_none_before_the_first_run() -> None:
    class Late(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.aux = None

    class Asking(Model):
        def auxiliary(self) -> Any:
            total: Any = 0
            for layer in self.layers:
                if layer.aux is not None:
                    total = total + layer.aux
            return total

    check_exact(Asking(Late), layer="Late")


def test_an_attribute_that_only_a_run_makes() -> None:
    class Lasting(Layer):
        def __init__(self) -> None:
            super().__init__()
            del self.aux

    class Asking(Model):
        def auxiliary(self) -> Any:
            return sum(m.aux for m in self.modules() if hasattr(m, "aux"))

    check_exact(Asking(Lasting), layer="Lasting")


def test_a_getter_and_a_property() -> None:
    class Getting(Layer):
        def get_aux(self) -> Any:
            return self.aux

        @property
        def doubled(self) -> Any:
            return self.get_aux() * 2

    class Asking(Model):
        def auxiliary(self) -> Any:
            return sum(layer.get_aux() + layer.doubled for layer in self.layers)

    check_exact(Asking(Getting), layer="Getting")


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


@pytest.mark.parametrize("name", ["by_name", "other"])
def test_an_attribute_of_a_module_inside_a_layer(name: str) -> None:
    class Asking(Model):
        def auxiliary(self) -> Any:
            return sum(getattr(layer.moe.gate, name) for layer in self.layers)

    check_exact(Asking(Nested), layer="Nested")


def test_another_trace_after_a_step_is_the_same() -> None:
    class Asking(Model):
        def auxiliary(self) -> Any:
            first, (second,) = self.layers[0].moe.gate.pair
            return 0 if first is None else second

    model = Asking(Nested)
    pipeline = InProcessPipeline(model, 2, transformer_layer_cls="Nested")
    graphs = []
    for is_checkpointed in (False, True):
        for size in (4, 6):
            pipeline.programs.forget()
            pipeline.train({"x": torch.randn(size, WIDTH)}, 2)
            graph = pipeline.programs.cut_graph({"x": torch.randn(size // 2, WIDTH)}, model.training).traced
            graphs.append((str(graph.graph), [(str(fact.node), fact.answer) for fact in graph.facts]))
        if not is_checkpointed:
            for name, layer in model.layers.named_children():
                _checkpoint(name, layer)
    assert len(set(map(str, graphs))) == 1


@pytest.mark.parametrize("name", ["by_name", "other"])
def test_all_modules_are_asked_for_an_attribute(name: str) -> None:
    class Asking(Model):
        def auxiliary(self) -> Any:
            return sum(getattr(m, name) for m in self.modules() if hasattr(m, name))

    check_exact(Asking(Nested), layer="Nested")


def test_tensors_in_containers() -> None:
    class Asking(Model):
        def auxiliary(self) -> Any:
            total: Any = 0
            for layer in self.layers:
                first, (second,) = layer.moe.gate.pair
                total = total + first * second
            return total

    check_exact(Asking(Nested), layer="Nested")


def test_a_hook_that_sets_an_attribute() -> None:
    class Quiet(Layer):
        def leave(self, y: Tensor) -> None: ...

    def note(module: Any, args: Any, output: Tensor) -> None:
        module.aux = output.pow(2).mean()

    model = Model(Quiet)
    for layer in model.layers:
        layer.register_forward_hook(note)
    check_exact(model, layer="Quiet")


def test_names_that_are_put_together() -> None:
    class Named(Layer):
        def leave(self, y: Tensor) -> None:
            for part in ("a", "b"):
                setattr(self, f"aux_{part}", y.pow(2).mean())

    class Asking(Model):
        def auxiliary(self) -> Any:
            return sum(layer.aux_a * layer.aux_b for layer in self.layers)

    check_exact(Asking(Named), layer="Named")


def test_layers_in_a_wrapper_that_passes_attributes_on() -> None:
    model = Model()
    for i in range(4):
        model.layers[i] = checkpoint_wrapper(model.layers[i])
    check_exact(model)


def test_a_helper_that_sets_an_attribute() -> None:
    class Helped(Layer):
        def leave(self, y: Tensor) -> None:
            leave_on(self, y)

    check_exact(Model(Helped), layer="Helped")


def leave_on(module: Any, y: Tensor) -> None:
    module.aux = y.abs().mean()


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


def test_numbers_that_forward_stores_before_and_after_the_run_reach_the_layers() -> None:
    class Adding(Layer):
        def leave(self, y: Tensor) -> None:
            self.aux = self.aux + y.pow(2).mean()

    class Resetting(Model):
        def begin(self, x: Tensor) -> None:
            for module in self.modules():
                if hasattr(module, "aux"):
                    setattr(module, "aux", 1.0)  # noqa: B010

        def auxiliary(self) -> Any:
            total = sum(layer.aux for layer in self.layers)
            for layer in self.layers:
                layer.aux = None
            assert self.layers[0].aux is None
            return total

    model = Resetting(Adding)
    check_exact(model, layer="Adding")
    assert all(layer.aux is None for layer in model.layers)


def test_an_attribute_that_no_run_stores_adds_no_node() -> None:
    class Scaled(Model):
        def auxiliary(self) -> Any:
            return sum(layer.scale for layer in self.layers)

    class Quiet(PlainLayer):
        scale = 2

    pipeline = InProcessPipeline(Scaled(Quiet), 2, {"x": torch.randn(2, WIDTH)}, transformer_layer_cls="Quiet")
    assert not [node for node in pipeline.cut.traced.graph.nodes if "left" in node.name or node.op == "get_attr"]


def refused(model: nn.Module, message: str, layer: str = "Layer") -> None:
    with pytest.raises(TracingError, match=message):
        InProcessPipeline(model, 2, transformer_layer_cls=layer)


def test_a_read_before_the_run_is_refused() -> None:
    class Early(Model):
        def begin(self, x: Tensor) -> None:
            self.layers[1].aux + 1

    refused(Early(), r"reads layers.1.aux before layers.1 runs(.|\n)*after the run")


def test_a_tensor_for_a_layer_in_an_attribute_is_refused() -> None:
    class Handing(Model):
        def begin(self, x: Tensor) -> None:
            for layer in self.layers:
                layer.mask = x > 0

    refused(Handing(), r"layers.0.mask(.|\n)*Pass it as an argument")


def test_a_store_on_a_layer_that_does_not_run_is_refused() -> None:
    class Unused(Model):
        def __init__(self) -> None:
            super().__init__()
            self.spare: Any = Layer()

        def auxiliary(self) -> Any:
            self.spare.level = 3
            return 0

    refused(Unused(), r"spare.level, and spare does not run")


def test_a_gate_that_layers_share_is_refused() -> None:
    class Shared(Model):
        def __init__(self) -> None:
            super().__init__(Nested)
            for layer in self.layers[1:]:
                layer.moe.gate = self.layers[0].moe.gate

        def auxiliary(self) -> Any:
            return self.layers[0].moe.gate.by_name

    refused(Shared(), r"Gate.by_name(.|\n)*layers.0.moe.gate, layers.1.moe.gate(.|\n)*Return the value", "Nested")


def test_the_dictionary_of_a_layer_is_refused() -> None:
    class Looking(Model):
        def auxiliary(self) -> Any:
            return sum(vars(layer)["aux"] for layer in self.layers)

    refused(Looking(), r"__dict__ of Layer(.|\n)*Read the attribute")

"""Calls that are one node of the graph."""

import operator
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx, nn
from transformers import LlamaConfig

from nxdpp.tracing.graph.calls import OpaqueCall, record_opaque_call, recorded
from nxdpp.tracing.graph.errors import TracingError
from nxdpp.tracing.graph.modes import Modes, modes_of
from tests.support.exact import assert_exact
from tests.support.traced_models import PlainLayer, PlainModel, options_for, run_graph, trace_with


def collect(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Return the arguments."""
    return args, kwargs


def _proxies(*names: str) -> list[fx.Proxy]:
    tracer = fx.Tracer()
    tracer.graph = fx.Graph()
    tracer.root = nn.Module()
    return [tracer.create_proxy("placeholder", name, (), {}) for name in names]


def test_static_arguments_keep_their_places() -> None:
    x, y = _proxies("x", "y")

    call = OpaqueCall(collect, (1, [x, "a"], None), {"scale": y, "mode": "b"})

    assert call("first", "second") == ((1, ["first", "a"], None), {"scale": "second", "mode": "b"})
    assert call.__name__ == "collect"


def test_the_parameter_of_a_traced_argument() -> None:
    x, y, z = _proxies("x", "y", "z")

    call = OpaqueCall(collect, ("static", x, [y]), {"scale": z})

    assert [call.parameter_of(index) for index in range(3)] == [1, None, "scale"]


def test_a_configuration_is_held_as_it_is_now() -> None:
    (x,) = _proxies("x")
    config = LlamaConfig(num_hidden_layers=3)

    call = OpaqueCall(collect, (config, x), {})
    config.num_hidden_layers = 5

    (held, _), _ = call(0)
    assert held.num_hidden_layers == 3


def test_a_call_becomes_one_node() -> None:
    x, y = _proxies("x", "y")

    result = record_opaque_call(collect, (x,), {"other": y, "n": 3})

    assert result.node.all_input_nodes == [x.node, y.node]
    assert result.node.name == "collect"


def test_only_calls_with_traced_values_and_without_modules_are_recorded() -> None:
    (x,) = _proxies("x")
    call = recorded(collect)
    layer = nn.Linear(1, 1)

    assert call(1, a=2) == ((1,), {"a": 2})
    assert call(x, layer) == ((x, layer), {})
    assert isinstance(call(1, [x]), fx.Proxy)
    assert torch.equal(recorded(torch.neg)(torch.ones(2)), -torch.ones(2))


class _TripledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return 3 * gradients[0], None


class _NegatedGradient(_TripledGradient):
    """Its forward is the other Function's."""

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return -gradients[0], None


class _WithSetup(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        return x * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return 5 * ctx.factor * gradients[0], None


_tripled: Any = _TripledGradient
_negated: Any = _NegatedGradient
_with_setup: Any = _WithSetup
_held = _tripled.apply


def _local(hidden: torch.Tensor) -> Any:
    class Local(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return 7 * gradients[0]

    function: Any = Local
    return function.apply(hidden)


_CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "class": lambda hidden: _tripled.apply(hidden, 1.5),
    "held method": lambda hidden: _held(hidden, 1.5),
    "inherited forward": lambda hidden: _negated.apply(hidden, 1.5),
    "setup_context": lambda hidden: _with_setup.apply(hidden),
    "argument of setup_context": lambda hidden: _with_setup.apply(hidden, 3.0),
}


class _Runs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layers: nn.ModuleList) -> torch.Tensor:
        for layer in layers:
            x = layer(x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


@pytest.mark.parametrize("tracer", ["hf", "torch"])
@pytest.mark.parametrize("call", _CALLS)
def test_its_backward_is_the_one_that_runs(tracer: str, call: str) -> None:
    class Model(PlainModel):
        def prepare(self, hidden: torch.Tensor) -> torch.Tensor:
            return _CALLS[call](hidden)  # type: ignore[no-any-return]

    before = [dict(vars(each)) for each in (torch.autograd.Function, _tripled, _negated, _with_setup)]
    model = Model()
    inputs = {"x": torch.ones(2, 4)}
    traced = trace_with(model, inputs, options_for(model, PlainLayer, tracer_cls=tracer))
    model(**inputs).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    run_graph(model, traced, inputs).backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)  # type: ignore[arg-type]
    assert before == [dict(vars(each)) for each in (torch.autograd.Function, _tripled, _negated, _with_setup)]


@pytest.mark.parametrize("call", _CALLS)
def test_a_function_runs_with_the_gradients_of_its_call(call: str) -> None:
    """torch turns gradients off before it calls a forward."""

    class Model(PlainModel):
        def prepare(self, hidden: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                mask = _CALLS[call](hidden)
            return hidden * mask + _CALLS[call](hidden)  # type: ignore[no-any-return]

    model = Model()
    traced = trace_with(model, {"x": torch.ones(2, 4)}, options_for(model, PlainLayer))
    nodes = [modes_of(node) for node in traced.graph.nodes if isinstance(node.target, OpaqueCall)]
    assert nodes == [Modes((("gradients", False),)), Modes()]


@pytest.mark.parametrize(
    "call", [lambda hidden: _TripledGradient.forward(None, hidden, 1.5), lambda hidden: _WithSetup.forward(hidden, 1.5)]
)
def test_a_forward_that_code_calls_itself_has_the_gradient_of_its_operations(call: Any) -> None:
    class Model(PlainModel):
        def prepare(self, hidden: torch.Tensor) -> torch.Tensor:
            return call(_with_setup.apply(hidden))  # type: ignore[no-any-return]

    model, inputs = Model(), {"x": torch.ones(2, 4)}
    traced = trace_with(model, inputs, options_for(model, PlainLayer))
    model(**inputs).backward()
    expected: list[Any] = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    run_graph(model, traced, inputs).backward()
    found: list[Any] = [parameter.grad for parameter in model.parameters()]
    assert all(map(torch.equal, found, expected))


def test_a_function_that_the_forward_defines_is_not_traced_through() -> None:
    class Model(PlainModel):
        def prepare(self, hidden: torch.Tensor) -> torch.Tensor:
            return _local(hidden)  # type: ignore[no-any-return]

    model = Model()
    with pytest.raises(TracingError, match=r"differs in two runs: Local\(model_embedding\)"):
        trace_with(model, {"x": torch.ones(2, 4)}, options_for(model, PlainLayer))


def test_a_function_that_runs_layers_in_its_backward_is_refused() -> None:
    class Reversible(PlainModel):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            function: Any = _Runs
            result: torch.Tensor = self.head(function.apply(self.embedding(x), self.layers)).mean()
            return result

    model = Reversible()
    with pytest.raises(TracingError, match=r"_Runs is an autograd Function .*\n  at .*test_calls.py:\d"):
        trace_with(model, {"x": torch.ones(2, 4)}, options_for(model, PlainLayer))


class Scales:
    """An object of the user with a traced value in it."""

    def __init__(self, scale: Any) -> None:
        self.inner = SimpleNamespace(scale=scale)


def scaled(hidden: torch.Tensor, scales: Scales) -> torch.Tensor:
    result: torch.Tensor = hidden * scales.inner.scale
    return result


def scaled_by(hidden: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return scaled(hidden, Scales(scale))


class GivesAnObject(PlainModel):
    def prepare(self, hidden: torch.Tensor) -> torch.Tensor:
        return scaled(hidden, Scales(hidden.mean()))


class GivesTensors(PlainModel):
    def prepare(self, hidden: torch.Tensor) -> torch.Tensor:
        return scaled_by(hidden, hidden.mean())


def test_a_single_node_with_a_traced_value_in_an_object_is_refused() -> None:
    model, inputs = GivesAnObject(), {"x": torch.ones(2, 4)}
    message = r"scaled is a single node and gets a Scales with a traced value in it. Give scaled the tensors themselves"
    with pytest.raises(TracingError, match=message):
        trace_with(model, inputs, options_for(model, PlainLayer, autowrap_functions=(scaled,)))
    assert_exact(model, inputs, PlainLayer)
    remedied = GivesTensors()
    traced = trace_with(remedied, inputs, options_for(remedied, PlainLayer, autowrap_functions=(scaled_by,)))
    assert torch.equal(run_graph(remedied, traced, inputs), remedied(**inputs))


def test_a_function_of_transformers_is_traced_through_then() -> None:
    function = FunctionType(scaled.__code__, globals(), "scaled")
    function.__module__ = "transformers.models.tapas.modeling_tapas"
    tracer = fx.Tracer()
    tracer.graph = fx.Graph()
    x = tracer.create_proxy("placeholder", "x", (), {})
    assert recorded(function)(x, Scales(x)).node.target is operator.mul


class CallsForward(PlainModel):
    """Calls its layers without their hooks, as SqueezeBERT does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer.forward(x)
        return x


def test_layers_whose_forward_is_called_are_nodes() -> None:
    model = CallsForward()

    traced = trace_with(model, {"x": torch.ones(3, 4)}, options_for(model, PlainLayer))

    assert traced.layers == tuple(f"layers.{index}" for index in range(len(model.layers)))
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_forward_that_the_user_has_put_on_a_layer_stays() -> None:
    model = CallsForward()
    first = next(model.layers.children())
    own = vars(first)["forward"] = first.forward

    trace_with(model, {"x": torch.ones(3, 4)}, options_for(model, PlainLayer))

    assert vars(first)["forward"] is own
    assert isinstance(first, nn.Module)

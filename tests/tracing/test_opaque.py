"""A call kept whole: static arguments are bound, traced ones are the node's."""

from typing import Any

import torch
from torch import fx, nn
from transformers import LlamaConfig

from nxdpp.tracing.opaque import OpaqueCall, record_opaque_call, recorded


def collect(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """What it was called with."""
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

"""Modes of torch in the spine are recorded, and refused where a stage cannot repeat them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import fx
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from nxdpp.tracing.graph.errors import TracingError
from nxdpp.tracing.graph.modes import Modes, modes_of
from nxdpp.tracing.graph.trace import TracedGraph
from tests.support.traced_models import PlainLayer, PreparedModel, options_for, trace_with


def _trace(function: Callable[[torch.Tensor], torch.Tensor], tracer: str | type[fx.Tracer] = "hf") -> TracedGraph:
    model = PreparedModel(function)
    return trace_with(model, {"x": torch.ones(2, 4)}, options_for(model, PlainLayer, tracer_cls=tracer))


def _modes(traced: TracedGraph) -> dict[str, Modes]:
    return {node.name: modes_of(node) for node in traced.graph.nodes if modes_of(node) != Modes()}


def _blocks(hidden: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        hidden = torch.sin(hidden)
    hidden = torch.cos(hidden)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = torch.tan(hidden)
        with torch.autocast("cpu", enabled=False), torch.no_grad(), torch.enable_grad():
            hidden = torch.exp(hidden)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.tanh(hidden)


class _Own(fx.Tracer):
    pass


@pytest.mark.parametrize("tracer", ["hf", _Own])
def test_each_node_has_the_modes_in_which_it_ran(tracer: str | type[fx.Tracer]) -> None:
    low = ("autocast cpu", (True, torch.bfloat16))
    assert _modes(_trace(_blocks, tracer)) == {
        "sin": Modes((("gradients", False),), 0),
        "tan": Modes((low,), 1),
        "exp": Modes((), 1),
        "tanh": Modes((low,), 2),
    }


class _Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def _default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


REFUSED: dict[str, Callable[[], Any]] = {
    "torch.inference_mode is used outside .* Use torch.no_grad": torch.inference_mode,
    "a default device .* Give device=": lambda: torch.device("meta"),
    "a TorchFunctionMode is .* inside the forward of a layer": _Doubling,
    "a torch dispatch mode is": lambda: FlopCounterMode(display=False),
    "saved_tensors_hooks": torch.autograd.graph.save_on_cpu,
    "torch.set_default_dtype is .* Give dtype=": _default_dtype,
    "torch.use_deterministic_algorithms": _deterministic,
    "torch.backends.mkldnn.flags": lambda: torch.backends.mkldnn.flags(enabled=False),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_mode_that_a_stage_cannot_repeat_is_refused(message: str) -> None:
    def prepare(hidden: torch.Tensor) -> torch.Tensor:
        with REFUSED[message]():
            return hidden * 2

    with pytest.raises(TracingError, match=rf"{message}[\s\S]*\n  at .*test_modes.py:\d+, in prepare"):
        _trace(prepare)


def _leaves_gradients_off(hidden: torch.Tensor) -> torch.Tensor:
    torch.set_grad_enabled(False)
    return hidden * 2


def test_a_mode_that_forward_leaves_changed_is_refused_and_put_back() -> None:
    with pytest.raises(TracingError, match=r"\(gradients\) and leaves it changed"):
        _trace(_leaves_gradients_off)
    assert torch.is_grad_enabled()

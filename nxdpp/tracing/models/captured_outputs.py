"""Outputs that hooks of transformers collect inside layers: router logits, hidden states, attention weights.

transformers puts a collector into a context variable while a model runs; hooks in the layers append to it. In a graph
each layer gets a collector of its own. Its content is a value of the graph::

    hidden ── begin_capture ── layers.0 ── hidden
                    └─ collected ─┴─ captured ── router_logits ──────── load_balancing_loss
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import getitem
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn
from transformers.utils import output_capturing

from nxdpp.counted import counted
from nxdpp.ground.torch_names import FORWARD_HOOKS, pytree
from nxdpp.ground.transformers_names import COLLECTOR
from nxdpp.tracing.code.names import variables_of
from nxdpp.tracing.graph.checks import run_in_every_step
from nxdpp.tracing.graph.swap import swapped
from nxdpp.tracing.modules import listings
from nxdpp.tracing.sizes.sizes import UnknownSizeError
from nxdpp.tracing.values.lost_changes import ROOT

_HIDDEN = "hidden_states"
Collected = dict[str, Any]


def begin_capture(
    argument: Any, layer: nn.Module, before: dict[str, int], settings: dict[str, list[int]]
) -> tuple[Any, Collected]:
    """Begin to collect outputs in ``layer``, which takes ``argument``; return ``argument`` and the collector.

    ``argument`` is the first tensor among the arguments of the layer. ``before`` has the keys to collect, with the
    number of outputs that earlier layers have given for each. ``settings`` has the numbers of the hidden states that
    are wanted, under the key of transformers; it is empty for all of them.
    """
    # transformers counts hidden states, and takes the input of the first layer for one more.
    collected: Collected = {key: [None] * count for key, count in before.items()}
    collected |= {key: set(selected) for key, selected in settings.items()}
    COLLECTOR.found.set(collected)
    return argument, collected


def captured(output: Any, collected: Collected, before: dict[str, int], expected: dict[str, int]) -> Collected:
    """End the collection in the layer that has returned ``output``; return what it has given for each key.

    Raises ``RuntimeError`` for a number of outputs that the trace does not expect.
    """
    COLLECTOR.found.set(None)
    given = {key: collected[key][count:] for key, count in before.items()}
    for key, count in expected.items():
        if len(given[key]) != count:
            raise RuntimeError(
                f"a layer has given {counted(len(given[key]), 'output')} for {key}; the trace expected {count}. Set "
                f"output_{key}=False"
            )
    return given


def captured_for_cost(output: Any, collected: Collected, before: dict[str, int], expected: dict[str, int]) -> Collected:
    """``captured`` for a layer that ran any number of times, or whose output is an estimate, on the way to a cost."""
    COLLECTOR.found.set(None)
    like = next(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor))
    return {key: (collected[key][before[key] :] + [like] * count)[:count] for key, count in expected.items()}


def ends_capture(node: fx.Node) -> bool:
    """Return whether ``node`` ends the collection in a layer, and so stays on its stage."""
    return node.target is captured


def call_capturing(
    tracer: Any,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    call: Callable[[tuple[Any, ...], dict[str, Any]], fx.Proxy],
) -> fx.Proxy:
    """Record ``module`` by ``call(args, kwargs)``, and what its hooks collect for the model that is traced."""
    # Without the name only a layer with hooks is refused.
    collector: Any = COLLECTOR.found.get() if COLLECTOR.exists or _hooks(module) else None
    hooks = [hook for hook in _hooks(module) if hook["key"] in collector] if collector else []
    if not hooks:
        return call(args, kwargs)
    values, structure = pytree.tree_flatten((args, kwargs))
    first = next((i for i, value in enumerate(values) if isinstance(value, fx.Proxy)), None)
    if first is None:
        return call(args, kwargs)
    keys = sorted({hook["key"] for hook in hooks})
    before = {key: len(collector[key]) for key in keys}
    selections = {key: sorted(value) for key, value in collector.items() if isinstance(value, set)}
    settings = selections if _HIDDEN in keys else {}
    selected = next(iter(settings.values()), None)
    name = tracer.path_of_module(module)
    assert name.startswith(ROOT)
    layer = tracer.create_proxy("get_attr", name, (), {})
    begun = tracer.create_proxy("call_function", begin_capture, (values[first], layer, before, settings), {})
    values[first] = tracer.create_proxy("call_function", getitem, (begun, 0), {})
    args, kwargs = pytree.tree_unflatten(values, structure)
    output = call(args, kwargs)
    collected = tracer.create_proxy("call_function", getitem, (begun, 1), {})
    ended = tracer.create_proxy("call_function", captured, (output, collected, before, {}), {})
    run_in_every_step(ended)
    expected = _expected(tracer, ended, hooks, before)
    ended.node.args = (*ended.node.args[:3], expected)
    for key, count in expected.items():
        given = tracer.create_proxy("call_function", getitem, (ended, key), {})
        for i in range(count):
            is_wanted = key != _HIDDEN or selected is None or before[key] + i in selected
            item = tracer.create_proxy("call_function", getitem, (given, i), {}) if is_wanted else None
            collector[key].append(item)
    return output


@contextmanager
def lasting_hooks() -> Iterator[None]:
    """Let models know afterwards that they have their hooks: a trace puts back what it changes in attributes."""
    hooked: list[tuple[nn.Module, dict[str, Any]]] = []
    install = output_capturing.install_all_output_capturing_hooks

    def install_and_note(model: Any, prefix: str | None = None) -> None:
        before = set(vars(model))
        install(model, prefix)
        hooked.append((model, {name: value for name, value in vars(model).items() if name not in before}))

    try:
        with swapped(vars(output_capturing), {install.__name__: install_and_note}):
            yield
    finally:
        for model, marks in hooked:
            vars(model).update(marks)


def _expected(tracer: Any, ended: fx.Proxy, hooks: list[dict[str, Any]], before: dict[str, int]) -> dict[str, int]:
    """The number of outputs for each key: of a run on fake tensors, or one of each hook where data decide."""
    try:
        counts: dict[str, int] = tracer.read(ended.node, _counts)
        return counts
    except UnknownSizeError:
        expected = dict.fromkeys(before, 0)
        for hook in hooks:
            has_input = hook["key"] == _HIDDEN and hook["capture_initial_hidden_state"]
            is_first = before[hook["key"]] + expected[hook["key"]] == 0
            expected[hook["key"]] += 1 + (has_input and is_first)
        return expected


def _counts(given: Collected) -> dict[str, int]:
    return {key: len(outputs) for key, outputs in given.items()}


def _hooks(module: nn.Module) -> list[dict[str, Any]]:
    """The settings of the hooks in ``module`` that collect outputs."""
    found = []
    for child in listings.modules(module):
        for hook in FORWARD_HOOKS.of(child).values():
            if isinstance(hook, FunctionType) and hook.__module__ == output_capturing.__name__:
                found.append({name: cell.cell_contents for name, cell in variables_of(hook)})
    return found

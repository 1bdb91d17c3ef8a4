"""Numbers for the values of graphs: nodes of two graphs that compute the same value have the same number.

A node's value follows from its function, its constants and the numbers of its arguments. A node with an effect of its
own (a module, a draw, an in-place change) is also told by its place among all such nodes.
"""

import functools
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy
import torch
from torch import fx, nn

from nxdpp.tracing.code.source import code_of
from nxdpp.tracing.graph.calls import OpaqueCall
from nxdpp.tracing.graph.checks import must_run
from nxdpp.tracing.graph.modes import modes_of
from nxdpp.tracing.graph.uses import draws_random_numbers
from nxdpp.tracing.modules import listings
from nxdpp.tracing.sizes.sizes import Fact
from nxdpp.tracing.state.object_state import PLAIN, content_of
from nxdpp.tracing.values.lost_changes import changes_in_place

_DEEPEST = 8
_MOST_ELEMENTS = 1 << 16
WithFacts = tuple[fx.Graph, Iterable[Fact]]
"""A graph with the facts that it belongs to."""
_PURE = re.compile(rf"(torch|{operator.add.__module__}|math|builtins)\b")


class ForeignNodeError(Exception):
    """A node has a node of another graph as its argument."""

    def __init__(self, node: fx.Node, argument: fx.Node) -> None:
        super().__init__(f"{node.name} uses {argument.name} of another graph")
        self.node = node


class ValueNumbers:
    """Numbers of values, equal for equal values of all graphs over the modules of ``root`` that are numbered."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._numbers: dict[Any, int] = {}

    def of(self, graph: fx.Graph, absent: Collection[fx.Node] = ()) -> "NumberedGraph":
        """The numbers of ``graph``; others take ``absent`` nodes as ``None``. Raises ``ForeignNodeError``."""
        known: dict[fx.Node, int] = {}
        shown: dict[fx.Node, Any] = {}
        effects: list[fx.Node] = []
        for node in graph.nodes:
            for argument in node.all_input_nodes:
                if argument not in known:
                    raise ForeignNodeError(node, argument)
            place = None
            if self._has_effect(node):
                place = len(effects)
                effects.append(node)
            known[node] = self._numbers.setdefault(_key_of(node, shown, place), len(self._numbers))
            shown[node] = _key(None, {}) if node in absent else ("node", known[node])
        return NumberedGraph(known, effects)

    def _has_effect(self, node: fx.Node) -> bool:
        if node.op in ("placeholder", "call_module", "output") or must_run(node) or changes_in_place(node):
            return True
        if node.op == "get_attr":
            return False
        is_pure = node.op == "call_method" or _PURE.match(getattr(node.target, "__module__", None) or "builtins")
        return not is_pure or isinstance(node.target, OpaqueCall) or draws_random_numbers(node, self._root)


@dataclass(frozen=True)
class NumberedGraph:
    """A graph with a number for each node, and the nodes with an effect in their order."""

    _numbers: Mapping[fx.Node, int]
    _effects: list[fx.Node]

    def results(self, facts: Iterable[Fact]) -> list[Any]:
        """The numbers of all nodes with an effect, and of the nodes of ``facts`` with their answers."""
        answers = [(self._numbers[fact.node], id(fact.read), repr(fact.answer)) for fact in facts]
        return [self._numbers[node] for node in self._effects] + answers

    def first_not_in(self, other: "NumberedGraph") -> fx.Node | None:
        """The first node whose value ``other`` does not have."""
        others = set(other._numbers.values())
        return next((node for node, number in self._numbers.items() if number not in others), None)


def compute_the_same(root: nn.Module, first: WithFacts, second: WithFacts, absent: Collection[fx.Node] = ()) -> bool:
    """Return whether two graphs over the modules of ``root`` have equal values, effects and facts.

    Other nodes take the ``absent`` ones as ``None``.
    """
    numbers = ValueNumbers(root)
    one, other = (numbers.of(graph, absent).results(facts) for graph, facts in (first, second))
    return one == other


def _key_of(node: fx.Node, known: Mapping[fx.Node, Any], place: int | None) -> Any:
    target: Any = node.target
    args: Any = (node.args, node.kwargs)
    if isinstance(target, OpaqueCall):
        # A value may be traced in one graph, and a constant in another.
        target, args = target.function, target.arguments(node.args)
    return (node.op, _key(target, known), _key(args, known), repr(modes_of(node)), place)


def _key(value: Any, known: Mapping[fx.Node, Any], depth: int = 0) -> Any:
    """A key that is equal for equal values. Objects that a run makes anew are compared by their content."""
    if isinstance(value, fx.Node):
        return known[value]
    if type(value) in PLAIN:
        # NaN is equal to itself here, and 1 is not True.
        return (type(value), repr(value) if type(value) in (float, complex) else value)
    if depth > _DEEPEST:
        return type(value)
    key: Callable[[Any], Any] = functools.partial(_key, known=known, depth=depth + 1)
    if isinstance(value, tuple | list):
        return (isinstance(value, tuple), *map(key, value))
    if isinstance(value, dict):
        return (type(value), *((key(name), key(item)) for name, item in value.items()))
    if isinstance(value, set | frozenset):
        return (set, frozenset(map(key, value)))
    if isinstance(value, slice | range):
        return (type(value), key(value.start), key(value.stop), key(value.step))
    if isinstance(value, type | BuiltinFunctionType):
        return id(value)
    if isinstance(value, FunctionType):
        cells = [key(content_of(cell)) for cell in value.__closure__ or ()]
        return (id(code_of(value)), *cells, key(value.__defaults__))
    if isinstance(value, MethodType):
        return (MethodType, key(value.__func__), key(value.__self__))
    if isinstance(value, functools.partial):
        return (functools.partial, key(value.func), key(value.args), key(value.keywords))
    return _object_key(value, key)


def _object_key(value: Any, key: Callable[[Any], Any]) -> Any:
    if isinstance(value, OpaqueCall):
        return (OpaqueCall, key(value.function), key(value.bound()))
    if isinstance(value, torch.Tensor):
        described = (tuple(value.shape), value.dtype)
        if value.is_meta or value.numel() > _MOST_ELEMENTS:
            return described
        return (*described, repr(value.detach().tolist()))
    if isinstance(value, numpy.ndarray):
        return (value.shape, value.dtype, value.tobytes()) if value.size <= _MOST_ELEMENTS else value.shape
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, nn.Module) and next(listings.parameters(value), None) is not None:
        return (type(value), id(value))
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict) and not callable(getattr(value, "__qualname__", None)):
        return (type(value), *((name, key(item)) for name, item in attributes.items()))
    shown = repr(value)
    return (type(value), None if " at 0x" in shown else shown)

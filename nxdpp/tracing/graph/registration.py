"""Graph of a model that no trace finishes: what a trace reached, then the order in which the code uses modules."""

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate

import torch
from torch import fx, nn

from nxdpp.ground.torch_names import MODULES, PARAMETERS, pytree
from nxdpp.tracing.code.order import parts_in_order
from nxdpp.tracing.graph.trace import TracedGraph, TracingOptions
from nxdpp.tracing.modules import listings
from nxdpp.tracing.modules.spine_modules import spine_names


def graph_by_registration(
    module: nn.Module, inputs: Sequence[str], options: TracingOptions, reached: Sequence[str] = ()
) -> TracedGraph:
    """Return a graph that runs each module with the result of the last one.

    It runs the modules and parameters of ``reached`` first, in that order. The others follow in the order in which the
    code of the modules above layers uses them. Parts that the code does not name are in the order of registration,
    parameters before modules. The graph decides a partition; it is never run.
    """
    layers = options.layers_of(module)
    spine = spine_names(module, layers, options.leaf_classes)
    graph = fx.Graph()
    value = graph.call_function(torch.zeros, (1,))
    places: dict[str, int] = {}
    for place, name in enumerate(reached):
        # A module in a list without layers was reached by its own name, and the list is one step.
        while name:
            places.setdefault(name, place)
            name = name.rpartition(".")[0]
    order = _code_order(module, spine)
    steps = sorted(_registered(module, spine), key=lambda step: (places.get(step[1], len(places)), order(step[1])))
    for op, name in steps:
        if op == "get_attr":
            value = graph.call_function(operator.add, (value, graph.get_attr(name)))
        else:
            value = graph.call_module(name, (value,))
    graph.output([value])
    known = set(layers)
    called = tuple(name for _, name in steps if name in known)
    return TracedGraph(graph, tuple(inputs), pytree.tree_structure([0]), called)


def _registered(module: nn.Module, spine: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the operation and the name of each parameter of the spine, and of each module below it."""
    for name, child in listings.named_modules(module):
        if name in spine:
            for key in [key for key, parameter in PARAMETERS.of(child).items() if parameter is not None]:
                yield "get_attr", f"{name}.{key}" if name else key
        elif name.rpartition(".")[0] in spine:
            yield "call_module", name


def _code_order(module: nn.Module, spine: Collection[str]) -> Callable[[str], tuple[tuple[int, int], ...]]:
    """A function of a name: the place in the code and the registration of each module in it, from the outermost one.

    The modules are parts of the modules ``spine``. An unknown part follows the one before.
    """
    places: dict[str, tuple[int, int]] = {}
    for path in spine:
        owner = listings.submodule(module, path)
        used = {name: place for place, name in enumerate(parts_in_order(owner))}
        place = -1
        for index, name in enumerate((*PARAMETERS.of(owner), *MODULES.of(owner))):
            place = used.get(name, place)
            places[f"{path}.{name}" if path else name] = (place, index)

    def order(name: str) -> tuple[tuple[int, int], ...]:
        paths = accumulate(name.split("."), "{}.{}".format)
        return tuple(places[path] for path in paths if path in places)

    return order

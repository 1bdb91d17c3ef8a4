"""Graph of a model in the order in which its modules are registered."""

import operator
from collections.abc import Sequence

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from nxdpp.tracing.layers import layer_names
from nxdpp.tracing.spine import spine_names
from nxdpp.tracing.trace import TracedGraph, TracingOptions


def graph_by_registration(module: nn.Module, inputs: Sequence[str], options: TracingOptions) -> TracedGraph:
    """Return a graph that runs all modules in the order of ``named_modules``, each with the result of the last one.

    A module above layers uses its own parameters before the modules in it. The graph decides a partition; it is never
    run.
    """
    layers = layer_names(module, options.layer_classes)
    spine = spine_names(module, layers, options.leaf_classes)
    graph = fx.Graph()
    value = graph.call_function(torch.zeros, (1,))
    for name, child in module.named_modules():
        if name in spine:
            for key, _ in child.named_parameters(recurse=False):
                value = graph.call_function(operator.add, (value, graph.get_attr(f"{name}.{key}" if name else key)))
        elif name.rpartition(".")[0] in spine:
            value = graph.call_module(name, (value,))
    graph.output([value])
    return TracedGraph(graph, tuple(inputs), pytree.tree_structure([0]), tuple(layers))

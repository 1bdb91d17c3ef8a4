"""Derivatives that ``forward`` takes of values between layers: forces, gradient penalties, a ``backward()``.

A stage has the autograd graph of its own layers. The derivative through a layer may be missing there, or be a part.
"""

from collections.abc import Collection

import torch
from torch import fx

from nxdpp.tracing.graph.errors import TracingError, model_line
from nxdpp.tracing.graph.search import reached

_REMEDY = (
    "A stage goes back through its own layers only, and only after all forwards. Take derivatives inside one layer, or "
    "inside a module next to the layers. A model that needs this one (forces of an energy) cannot be cut: train it "
    "whole on each rank, by DistributedDataParallel."
)


def refuse_derivatives(graph: fx.Graph, layers: Collection[str]) -> None:
    """Raise ``TracingError`` for a ``backward()``, and for a ``torch.autograd.grad`` through one of ``layers``."""
    for node in graph.nodes:
        through = None
        if node.target in ("backward", torch.autograd.backward):
            through = "the layers (backward)"
        elif node.target is torch.autograd.grad:
            names = _between(_argument(node, "outputs", 0), _argument(node, "inputs", 1))
            through = next((name for name in names if name in layers), None)
        if through is not None:
            raise TracingError(
                f"forward takes a derivative through {through}\n  at {model_line(node.stack_trace)}\n{_REMEDY}"
            )


def _argument(node: fx.Node, name: str, position: int) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(node.kwargs[name] if name in node.kwargs else node.args[position], found.append)
    return found


def _between(ends: Collection[fx.Node], starts: Collection[fx.Node]) -> list[str]:
    """Names of the modules on the ways from ``starts`` to ``ends``, in their order."""
    above = reached(ends, lambda node: () if node in starts else node.all_input_nodes)
    between = set(starts)
    for node in sorted(above):
        if not between.isdisjoint(node.all_input_nodes):
            between.add(node)
    return [str(node.target) for node in sorted(between) if node.op == "call_module" and node not in starts]

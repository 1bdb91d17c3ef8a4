"""Search of a graph from node to node."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from torch import fx

T = TypeVar("T")


def reached(starts: Iterable[T], following: Callable[[T], Iterable[T]]) -> dict[T, None]:
    """``starts`` and all that ``following`` leads to from them, each once."""
    found = dict.fromkeys(starts)
    pending = list(found)
    while pending:
        new = [each for each in dict.fromkeys(following(pending.pop())) if each not in found]
        found.update(dict.fromkeys(new))
        pending += new
    return found


def ancestors(node: fx.Node) -> dict[fx.Node, None]:
    """``node`` and all nodes that it depends on."""
    return reached([node], lambda each: each.all_input_nodes)

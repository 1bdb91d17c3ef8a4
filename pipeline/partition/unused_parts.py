"""Stages of parts that a graph leaves out: a vision tower for inputs without images, a pooler for a loss of tokens."""

from collections.abc import Mapping

from torch import fx, nn

from nxdpp.tracing.code.order import parts_in_order
from nxdpp.tracing.modules import listings


class UnusedParts:
    """Stages of the parts of modules above layers that the graph leaves out, from the order of the code."""

    def __init__(self, assigned: Mapping[fx.Node, int], root: nn.Module) -> None:
        self._root = root
        # Stages of the nodes of each module, and in each module above layers.
        self._nodes: dict[str, set[int]] = {}
        self._above: dict[str, set[int]] = {}
        for node, stage in assigned.items():
            if node.op == "call_module":
                parts = str(node.target).split(".")
                self._nodes.setdefault(str(node.target), set()).add(stage)
                for length in range(len(parts)):
                    self._above.setdefault(".".join(parts[:length]), set()).add(stage)
        self._orders: dict[str, list[str]] = {}

    def stages(self, name: str) -> set[int]:
        """Return the stage of the parameter ``name``, or none if the code does not tell.

        It is the first one of the next module with layers, or the last one of the modules before.
        """
        path = name.rpartition(".")[0]
        while path and path not in self._above:
            path = path.rpartition(".")[0]
        prefix = f"{path}." if path else ""
        order = [prefix + part for part in self._order(path)]
        part = prefix + name.removeprefix(prefix).partition(".")[0]
        if part not in order:
            return set()
        before, after = order[: order.index(part)], order[order.index(part) :]
        if found := next((self._above[other] for other in after if other in self._above), None):
            return {min(found)}
        if any(other in self._above for other in before):
            return {max(stage for other in before for stage in self._stages_of(other))}
        return set()

    def _stages_of(self, path: str) -> set[int]:
        return self._above.get(path) or self._nodes.get(path) or set()

    def _order(self, path: str) -> list[str]:
        if path not in self._orders:
            self._orders[path] = parts_in_order(listings.submodule(self._root, path)) if path in self._above else []
        return self._orders[path]

"""Modes of torch around a stage's nodes: gradients off, autocast, attention kernels (``tracing/graph/modes.py``)."""

from collections.abc import Callable
from typing import Any

from torch import fx

from nxdpp.tracing.graph.modes import Modes, RunningModes, modes_of


class StageModes:
    """Adds changes of modes to a stage's graph, between nodes with different ones.

    A stage enters a block of autocast once, before its first node there.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._last = Modes()
        self._names: dict[str, None] = {}
        self._running: RunningModes | None = None

    def begin(self, node: fx.Node) -> None:
        """Change to the modes of ``node``, the next one of the stage."""
        modes = modes_of(node)
        if modes != self._last:
            self._graph.call_function(_Change(self, modes))
            self._names.update(dict.fromkeys(name for name, _ in modes.changes))
            self._last = modes

    def restore_after(self, module: fx.GraphModule) -> None:
        """Make ``module``, of the finished graph, restore all modes at the end of its forward, also of a failed one."""
        if any(isinstance(node.target, _Change) for node in self._graph.nodes):
            vars(module)["forward"] = self._restoring(module.forward)

    def change(self, modes: Modes) -> None:
        """Set ``modes``; during a forward."""
        assert self._running is not None
        self._running.change(modes)

    def _restoring(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self._running = RunningModes(tuple(self._names))
            try:
                return forward(*args)
            finally:
                self._running.restore()
                self._running = None

        return run


class _Change:
    __name__ = "modes"

    def __init__(self, stage: StageModes, modes: Modes) -> None:
        self._stage = stage
        self._modes = modes

    def __call__(self) -> None:
        self._stage.change(self._modes)

"""``module.forward(x)`` in place of ``module(x)``: a node of the graph all the same."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

from torch import fx, nn

from nxdpp.tracing.swap import swapped


@contextmanager
def recorded_direct_calls(tracer: fx.Tracer, leaves: Iterable[nn.Module]) -> Iterator[None]:
    """Record calls of the ``forward`` of ``leaves`` too. When the graph runs, the module as a whole is called, and so
    its hooks run."""
    with ExitStack() as stack:
        for leaf in leaves:
            if type(leaf).forward is not nn.Module.forward:
                stack.enter_context(swapped(vars(leaf), {"forward": _DirectCall(tracer, leaf)}))
        yield


class _DirectCall:
    def __init__(self, tracer: fx.Tracer, leaf: nn.Module) -> None:
        self._tracer = tracer
        self._leaf = leaf
        self._forward: Any = leaf.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._tracer.call_module(self._leaf, self._forward, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A copy of the module runs by itself: nobody traces it.
        forward = self._forward
        if isinstance(forward, MethodType) and forward.__self__ is self._leaf:
            return MethodType(forward.__func__, memo[id(self._leaf)])
        return forward

"""``module.forward(x)`` in place of ``module(x)``: a node of the graph all the same."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
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
                stack.enter_context(swapped(vars(leaf), {"forward": partial(_record, tracer, leaf, leaf.forward)}))
        yield


def _record(tracer: fx.Tracer, leaf: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
    return tracer.call_module(leaf, forward, args, kwargs)

"""A call that the graph keeps as one node, with everything that is no traced value held beside it."""

import copy
from collections.abc import Callable
from typing import Any

from torch import fx, nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedConfig


class OpaqueCall:
    """``function`` with its static arguments bound; called with the traced ones, in their order.

    fx can hold tensors, numbers and strings in a node's arguments, but no configuration and no closure. Those
    are kept here instead, and ``traced_arguments`` says which parameter each argument of the node is for.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, self._spec = pytree.tree_flatten((args, kwargs))
        self.function = function
        self.__name__ = getattr(function, "__name__", type(function).__name__).strip("<>")
        self._positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, fx.Proxy)]
        self._leaves = [None if isinstance(leaf, fx.Proxy) else _freeze(leaf) for leaf in leaves]

    def __call__(self, *traced: Any) -> Any:
        """Call the function with the static arguments in their places."""
        leaves = list(self._leaves)
        for position, value in zip(self._positions, traced, strict=True):
            leaves[position] = value
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return self.function(*args, **kwargs)

    @property
    def declares_dict(self) -> bool:
        """Whether the function is annotated to return a ``dict``."""
        return getattr(self.function, "__annotations__", {}).get("return") in (dict, "dict")

    def bound(self) -> tuple[Any, Any]:
        """The static arguments and keywords, with ``...`` in the places of the traced ones."""
        leaves = [... if i in self._positions else leaf for i, leaf in enumerate(self._leaves)]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return args, kwargs

    def parameter_of(self, index: int) -> str | int | None:
        """The keyword or the position under which traced argument ``index`` itself is handed to the function."""
        marks: list[Any] = list(self._leaves)
        for i, position in enumerate(self._positions):
            marks[position] = _Mark(i)
        args, kwargs = pytree.tree_unflatten(marks, self._spec)
        for name, value in (*enumerate(args), *kwargs.items()):
            if isinstance(value, _Mark) and value.index == index:
                return name  # type: ignore[no-any-return]
        return None


class _Mark:
    def __init__(self, index: int) -> None:
        self.index = index


def _freeze(leaf: Any) -> Any:
    # A forward may change its configuration for the time of the call; the call wants it as it is now.
    return copy.copy(leaf) if isinstance(leaf, PreTrainedConfig) else leaf


def record_opaque_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Proxy:
    """Add a node for ``function(*args, **kwargs)``, at least one of whose arguments is a proxy."""
    traced = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, fx.Proxy)]
    call = OpaqueCall(function, args, kwargs)
    return traced[0].tracer.create_proxy("call_function", call, tuple(traced), {}, name=call.__name__)


def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which becomes one node of the graph wherever an argument is a proxy.

    A call that is also handed modules runs as it is, so that the layers among them are seen.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, nn.Module) for leaf in leaves):
            return function(*args, **kwargs)
        if any(isinstance(leaf, fx.Proxy) for leaf in leaves):
            return record_opaque_call(function, args, kwargs)
        return function(*args, **kwargs)

    return call

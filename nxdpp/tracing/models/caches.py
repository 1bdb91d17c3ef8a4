"""Key-value caches that the spine hands to layers: empty ones become ``None``, all others are refused.

Some models make a cache although ``use_cache`` is off (XLM, FlauBERT). It is empty at each layer, and a layer only adds
its keys and values to it. The layers get ``None``, as from a model that heeds ``use_cache=False``.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.utils.generic import ModelOutput

from nxdpp.tracing.graph.absent_values import value_or_absent
from nxdpp.tracing.graph.calls import recorded
from nxdpp.tracing.graph.swap import in_this_thread

_CACHES = (Cache, EncoderDecoderCache)


def refuse_caches(values: Iterable[Any]) -> None:
    """Raise ``RuntimeError`` for a cache among ``values``, the arguments of a layer or of a function that is a node."""
    for value in values:
        if _is_cache(value):
            raise RuntimeError(
                f"a {type(value).__name__} is handed on between layers, which keep it for later tokens; a pipeline has "
                f"no cache. Call the model with past_key_values=None"
            )


def recorded_as_node(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, recorded as one node for each call with a traced value; a cache among its arguments is refused.

    The result may be ``None`` (``tracing/graph/absent_values.py``). Other threads call ``function`` itself.
    """
    record = recorded(function)

    def call(*args: Any, **kwargs: Any) -> Any:
        refuse_caches((*args, *kwargs.values()))
        return value_or_absent(record(*args, **kwargs), function)

    return in_this_thread(call, function)


def without_cache(output: Any) -> Any:
    """``output`` of a model without the cache in it."""
    if not isinstance(output, ModelOutput):
        return output
    caches = [name for name, value in output.items() if _is_cache(value)]
    if not caches:
        return output
    fields = {name: value for name, value in output.items() if name not in caches}
    return type(output)(**fields)


def _is_cache(value: Any) -> bool:
    # A traced value would look through the stack for the answer to isinstance.
    return issubclass(type(value), _CACHES)


def without_empty_caches(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of ``module`` with ``None`` in place of empty caches, where that is the default."""
    if not any(_is_empty_cache(value) for value in (*args, *kwargs.values())):
        return args, kwargs
    # A forward may be wrapped on the module while it is traced; its class has the names.
    given = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    for name, value in given.arguments.items():
        if given.signature.parameters[name].default is None and _is_empty_cache(value):
            given.arguments[name] = None
    return given.args[1:], given.kwargs


def _is_empty_cache(value: Any) -> bool:
    # A traced value would look through the stack for the answer to isinstance.
    return issubclass(type(value), Cache) and value.get_seq_length() == 0

"""Caches that code outside the layers makes although ``use_cache`` is off (XLM, FlauBERT).

Such a cache is empty at each layer, and a layer only adds its keys and values to it. The layers get ``None``, as from a
model that heeds ``use_cache=False``.
"""

import inspect
from typing import Any

from torch import nn
from transformers.cache_utils import Cache


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

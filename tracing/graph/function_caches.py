"""Functions with a cache (``functools.lru_cache``), called without it.

A run on fake tensors would leave fake tensors in the cache, and a later step would get them.
"""

import functools
import re
from types import FunctionType
from typing import Any

from torch import nn

from nxdpp.tracing.graph.swap import sources
from nxdpp.tracing.modules import listings
from nxdpp.tracing.state.object_state import content_of

_FRAMEWORKS = re.compile(r"(torch|nxdpp)\b")
# Globals of a Python module, with the functions to call instead of the ones with a cache.
Uncached = list[tuple[dict[str, Any], dict[str, Any]]]


def uncached_functions(root: nn.Module) -> Uncached:
    """The functions with a cache that are globals next to the classes of modules in ``root``, without their caches.

    ``all_swapped`` puts them in place.
    """
    found = []
    for source in sources(list(listings.modules(root)), _FRAMEWORKS):
        plain = {name: _without_cache(value) for name, value in vars(source).items()}
        changes = {name: function for name, function in plain.items() if function is not None}
        if changes:
            found.append((vars(source), changes))
    return found


def _without_cache(value: Any) -> Any:
    """The function whose results ``value`` keeps; ``None`` if it keeps none."""
    if isinstance(value, functools._lru_cache_wrapper):
        return value.__wrapped__
    if not isinstance(value, FunctionType):
        return None
    # transformers puts a function around the one with a cache; a trace puts its own around that.
    is_recorded = (value.__module__ or "").startswith("nxdpp.tracing.")
    inside = (_without_cache(content_of(cell)) for cell in value.__closure__ or ())
    kept = (function for function in inside if is_recorded or function is getattr(value, "__wrapped__", None))
    return next((function for function in kept if function is not None), None)

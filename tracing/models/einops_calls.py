"""einops in the spine: each rearrangement is one node. Nothing here imports einops."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx

from nxdpp.tracing.graph.calls import has_proxy, record_opaque_call
from nxdpp.tracing.graph.swap import swapped

_MODULE = "einops.einops"
_PACKING = "einops.packing"
_BACKEND = "einops._backends"


@contextmanager
def recorded_einops() -> Iterator[None]:
    """Record ``rearrange``, ``reduce`` and ``repeat`` of traced values, under any name of the functions.

    ``einsum``, ``pack``, ``unpack`` and ``parse_shape`` are traced through: they call torch.
    """
    if _MODULE not in sys.modules:
        yield
        return
    functions, packing = vars(sys.modules[_MODULE]), vars(sys.modules[_PACKING])
    get_backend, apply_recipe = functions["get_backend"], functions["_apply_recipe"]

    def backend_of(tensor: Any) -> Any:
        return vars(sys.modules[_BACKEND])["TorchBackend"]() if isinstance(tensor, fx.Proxy) else get_backend(tensor)

    def apply(backend: Any, recipe: Any, tensor: Any, reduction_type: Any, axes_lengths: Any) -> Any:
        if has_proxy((tensor, axes_lengths), {}):
            return record_opaque_call(rearrange, (tensor, recipe, reduction_type, axes_lengths), {})
        return apply_recipe(backend, recipe, tensor, reduction_type, axes_lengths)

    changes = {"get_backend": backend_of, "_apply_recipe": apply}
    with swapped(functions, changes), swapped(packing, {"get_backend": backend_of}):
        yield


def rearrange(tensor: Any, recipe: Any, reduction: Any, axes_lengths: Any) -> Any:
    """``tensor`` after a rearrangement of einops, which has parsed it to a recipe."""
    functions = vars(sys.modules[_MODULE])
    backend = functions["get_backend"](tensor)
    return functions["_apply_recipe"](backend, recipe, tensor, reduction, axes_lengths)

"""Cuts after modules that are no transformer layers: an embedding, a norm, a head."""

from collections.abc import Sequence

from torch import nn

from nxdpp.tracing import listings
from nxdpp.tracing.layers import layer_names


def modules_to_cut_after(
    module: nn.Module, cuts: Sequence[str], layer_classes: tuple[type[nn.Module], ...]
) -> tuple[str, ...]:
    """Return the names in ``cuts`` of modules that are no layers. The trace takes these for layers.

    Names without a module are left to the check of all cuts. Raises ``ValueError`` for a module inside a layer, one
    that holds layers, and one without parameters.
    """
    layers = set(layer_names(module, layer_classes))
    modules = dict(listings.named_modules(module))
    others = tuple(cut for cut in cuts if isinstance(cut, str) and cut and cut not in layers and cut in modules)
    for cut in others:
        inside = next((layer for layer in layers if cut.startswith(f"{layer}.")), None)
        if inside is not None:
            raise ValueError(
                f"pipeline_cuts names {cut!r}, which is inside the transformer layer {inside}. A layer is one node of "
                f"the graph and runs on one stage: cut after {inside!r}."
            )
        if any(layer.startswith(f"{cut}.") for layer in layers):
            raise ValueError(
                f"pipeline_cuts names {cut!r}, which holds transformer layers. No stage runs it as a whole: cut after "
                f"one of its layers."
            )
        if next(listings.parameters(modules[cut]), None) is None:
            raise ValueError(
                f"pipeline_cuts names {cut!r}, a {type(modules[cut]).__name__} without parameters, which may run on "
                f"every stage that needs its result. Cut after a transformer layer, or a module with parameters."
            )
    return others

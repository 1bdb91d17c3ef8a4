"""Cuts: the layers, or other modules with parameters, after which a model is split into stages."""

from collections.abc import Iterable, Sequence

from torch import nn

from nxdpp.tracing.modules import listings
from nxdpp.tracing.modules.closest_name import meant
from nxdpp.tracing.modules.layers import layer_names


def even_cuts(layers: Sequence[str], stages: int) -> list[str]:
    """Return the cuts for ``stages`` of even size; the remainder goes to the later stages.

    Ten layers on four stages are cut after layers 1, 3 and 6. Raises ``ValueError`` for fewer layers than stages.
    """
    _check_enough(layers, stages)
    size, remainder = divmod(len(layers), stages)
    sizes = [size] * (stages - remainder) + [size + 1] * remainder
    return [layers[sum(sizes[: stage + 1]) - 1] for stage in range(stages - 1)]


def check_cuts(cuts: Sequence[str], layers: Sequence[str], stages: int, source: str = "pipeline_cuts") -> list[str]:
    """Return ``cuts`` in the order of ``layers``.

    A cut after the last layer leaves the norm and the head to the last stage.

    Args:
        cuts: names of layers.
        layers: names of all transformer layers, in the order of execution.
        stages: number of stages.
        source: the argument that gave the cuts, for messages.

    Raises:
        TypeError: unless ``cuts`` is a list of names.
        ValueError: for an unknown or repeated name, and for a number of cuts other than ``stages - 1``.
    """
    if isinstance(cuts, str) or not isinstance(cuts, Iterable):
        raise TypeError(f"{source} gave {cuts!r:.80}: cuts are a list of names of layers.")
    cuts = list(cuts)
    # One more stage than layers is possible: the last stage then has no layer.
    if stages > len(layers) + 1:
        _check_enough(layers, stages)
    unknown = [cut for cut in cuts if cut not in layers]
    if unknown:
        raise ValueError(
            f"{source} names {unknown}{meant(str(unknown[0]), layers)}, which are no transformer layers of the model, "
            f"and no modules with parameters beside them that run. A cut falls after one of these; the layers are: "
            f"{', '.join(layers)}."
        )
    repeated = sorted({cut for cut in cuts if list(cuts).count(cut) > 1})
    if repeated:
        raise ValueError(f"{source} names {repeated} more than once. Name each layer once.")
    if len(cuts) != stages - 1:
        raise ValueError(
            f"{source} has {len(cuts)} names, but {stages} stages need {stages - 1} cuts. "
            f"Given: {list(cuts)}; the layers are: {', '.join(layers)}."
        )
    return sorted(cuts, key=list(layers).index)


def stages_of_layers(cuts: Sequence[str], layers: Sequence[str]) -> dict[str, int]:
    """Return the stage of each layer. ``cuts`` are in the order of ``layers``."""
    stage = 0
    stages = {}
    for layer in layers:
        stages[layer] = stage
        stage += layer in cuts
    return stages


def _check_enough(layers: Sequence[str], stages: int) -> None:
    if len(layers) < stages:
        raise ValueError(
            f"{len(layers)} transformer layers cannot be split over {stages} pipeline stages: each needs at least "
            f"one. Use at most {len(layers)} stages. The layers are: {', '.join(layers)}."
        )


def modules_to_cut_after(
    module: nn.Module, cuts: Sequence[str], layer_classes: tuple[type[nn.Module], ...]
) -> tuple[str, ...]:
    """Return the names in ``cuts`` of modules that are not layers. The trace treats them as layers.

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

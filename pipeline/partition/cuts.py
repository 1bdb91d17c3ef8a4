"""Which transformer layers, and so which stage of the pipeline, a cut gives."""

from collections.abc import Sequence


def even_cuts(layers: Sequence[str], stages: int) -> list[str]:
    """The layers after which to cut for ``stages`` stages of even size; the remainder goes to the later ones.

    Ten layers on four stages are cut after layers 1, 3 and 6. Raises ``ValueError`` where there are fewer
    layers than stages.
    """
    _check_enough(layers, stages)
    size, remainder = divmod(len(layers), stages)
    sizes = [size] * (stages - remainder) + [size + 1] * remainder
    return [layers[sum(sizes[: stage + 1]) - 1] for stage in range(stages - 1)]


def check_cuts(cuts: Sequence[str], layers: Sequence[str], stages: int) -> list[str]:
    """``cuts`` in the order of the layers.

    After the last layer may be cut too: the last stage then has what follows it, the norm and the head. Raises
    ``ValueError`` for a name that is no layer or stands twice, and for another number of cuts than ``stages`` needs.
    """
    # One more stage than layers: the last has none.
    if stages > len(layers) + 1:
        _check_enough(layers, stages)
    unknown = [cut for cut in cuts if cut not in layers]
    if unknown:
        raise ValueError(
            f"pipeline_cuts names {unknown}, which are no transformer layers of the model. "
            f"A cut falls after a layer; the layers are: {', '.join(layers)}."
        )
    repeated = sorted({cut for cut in cuts if list(cuts).count(cut) > 1})
    if repeated:
        raise ValueError(f"pipeline_cuts names {repeated} more than once; a layer can be cut after only once.")
    if len(cuts) != stages - 1:
        raise ValueError(
            f"pipeline_cuts has {len(cuts)} names, but {stages} stages need {stages - 1} cuts. "
            f"Given: {list(cuts)}; the layers are: {', '.join(layers)}."
        )
    return sorted(cuts, key=list(layers).index)


def stages_of_layers(cuts: Sequence[str], layers: Sequence[str]) -> dict[str, int]:
    """The stage of each layer; ``cuts`` stand in the order of ``layers``.

    With a cut after the last layer there is one more stage, which has no layer.
    """
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

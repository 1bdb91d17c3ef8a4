"""The modules that a forward runs as a whole on one rank: layers, embeddings, norms and heads."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from nxdpp.ground.torch_names import MODULES
from nxdpp.pipeline.partition.partition import Partition
from nxdpp.tracing.modules import listings

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True, eq=False)
class StageLeaf:
    """A module below the spine that has parameters.

    Attributes:
        name: in the model; of a module with several names, the first.
        module: the module. A parameter of the spine is a leaf too, with the module whose attribute it is.
        stages: the stages that hold all its parameters.
        layer_stage: its stage if it is a layer, otherwise ``None``.
        ends_stage: ``True`` if it is the last layer of its stage.
    """

    name: str
    module: nn.Module
    stages: frozenset[int]
    layer_stage: int | None
    ends_stage: bool


def stage_leaves(module: nn.Module, partition: Partition) -> list[StageLeaf]:
    """Return the modules of ``module`` that run as a whole, with the stages of ``partition``.

    Raises ``RuntimeError`` for a module whose parameters no stage has all of.
    """
    spine = {""}
    for layer in partition.layers:
        parts = layer.split(".")
        spine.update(".".join(parts[:depth]) for depth in range(1, len(parts)))
    last_layers = {stage: name for name, stage in partition.layer_stages.items()}
    leaves = []
    for name, child in _below(module, "", spine):
        parameters = [key for key, _ in listings.named_parameters(child, remove_duplicate=False)]
        if not parameters:
            continue
        owners = [partition.owners.get(f"{name}.{key}", set()) for key in parameters]
        stages = frozenset(set.intersection(*owners))
        if not stages:
            raise RuntimeError(
                f"generate over a pipeline: {name}, a {type(child).__name__}, has parameters on the stages "
                f"{sorted(set().union(*owners))}, and no stage has all. Cut elsewhere (pipeline_cuts)."
            )
        stage = partition.layer_stages.get(name)
        ends = stage is not None and last_layers[stage] == name and stage < partition.stages - 1
        leaves.append(StageLeaf(name, child, stages, stage, ends))
    return leaves


def spine_parameters(module: nn.Module, partition: Partition, leaves: Sequence[StageLeaf]) -> list[StageLeaf]:
    """Return the parameters of the spine's own modules; each has the module whose attribute it is."""
    inside = tuple(f"{leaf.name}." for leaf in leaves)
    return [
        StageLeaf(name, module.get_submodule(name.rpartition(".")[0]), frozenset(partition.owners[name]), None, False)
        for name, _ in listings.named_parameters(module, remove_duplicate=False)
        if not name.startswith(inside)
    ]


def stage_of(leaf: StageLeaf, current: int) -> int:
    """Return the stage that runs ``leaf`` after code of the stage ``current``, as in the traced graph."""
    if leaf.layer_stage is not None:
        return leaf.layer_stage
    if current in leaf.stages:
        return current
    return max([stage for stage in leaf.stages if stage <= current] or leaf.stages)


def _below(
    module: nn.Module, prefix: str, spine: set[str], seen: set[int] | None = None
) -> Iterator[tuple[str, nn.Module]]:
    seen = set() if seen is None else seen
    for key, child in MODULES.of(module).items():
        if child is None or id(child) in seen:
            continue
        seen.add(id(child))
        name = f"{prefix}{key}"
        never_runs = type(child).forward is nn.Module.forward
        if name in spine or isinstance(child, _CONTAINERS) or never_runs:
            yield from _below(child, f"{name}.", spine, seen)
        else:
            yield name, child

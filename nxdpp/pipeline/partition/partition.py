"""Partition of a model: the stage of every transformer layer, graph node and parameter.

::

    embed   layers.0   layers.1 | layers.2   layers.3   norm   lm_head   loss       cut after layers.1
    └──────── stage 0 ─────────┘ └──────────────── stage 1 ─────────────────┘
    mask, positions, rotary_emb, shapes: on every stage that needs them

``make_partition`` is the one place that makes it. A ``PartitionPolicy`` chooses the cuts: evenly, as given, by cost
(``layer_costs.py``), or by a function of the caller.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

from torch import fx, nn

from nxdpp.counted import counted
from nxdpp.pipeline.partition import assignment
from nxdpp.tracing.graph.trace import TracedGraph
from nxdpp.tracing.modules import listings
from nxdpp.tracing.modules.closest_name import meant
from nxdpp.tracing.modules.layers import layer_names

PartitionPolicy = Callable[[TracedGraph, int], Sequence[str]]
_GIVE_BATCH = (
    "Give partition_batch at construction: the inputs of one microbatch with labels; meta tensors are allowed."
)
"""A function of the traced model and the number of stages. It returns the layers after which to cut."""


@dataclass(frozen=True, eq=False)
class Partition:
    """Assignment of a model to stages.

    Attributes:
        module: the model.
        layer_stages: the stage of each transformer layer, in the order of execution.
        cuts: names of the layers after which the model is cut, one fewer than stages.
        owners: the stages that hold each parameter, and each buffer that a forward changes.
        assumed: ``True`` if the graph at construction was made without knowing the inputs. Each trace for real inputs
            verifies the partition.
    """

    module: nn.Module
    layer_stages: dict[str, int]
    cuts: list[str]
    owners: assignment.Owners
    assumed: bool = False

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.cuts) + 1

    @property
    def layers(self) -> list[str]:
        """Names of all transformer layers, in the order of execution."""
        return list(self.layer_stages)

    @property
    def first_trained(self) -> int:
        """The first stage with a parameter that requires a gradient; the number of stages where none does."""
        named = listings.named_parameters(self.module, remove_duplicate=False)
        trained = [self.owners.get(name, ()) for name, parameter in named if parameter.requires_grad]
        return min(chain.from_iterable(trained), default=self.stages)

    def layers_of(self, stages: Collection[int]) -> list[str]:
        """Names of the transformer layers of ``stages``."""
        return [layer for layer, stage in self.layer_stages.items() if stage in stages]

    def parameters_of(self, stage: int) -> list[str]:
        """Names of the parameters, and of the changing buffers, that ``stage`` holds."""
        return [name for name, stages in self.owners.items() if stage in stages]

    def assign(self, traced: TracedGraph) -> dict[fx.Node, int]:
        """Return the stage of each node of another graph of the same model.

        Raises ``ValueError`` where the graph does not run each layer once, in the order of this partition.
        """
        if traced.layers != tuple(self.layers):
            assignment.check_layers_ran(traced, self.layers)
            raise ValueError(self._other_order(traced))
        assigned = assignment.assign_nodes(traced, self.module, self.layer_stages, self.stages, self.owners)
        if self.assumed:
            assignment.check_buffers_have_owners(traced, assigned, self.module, self.owners)
        return assigned

    def _other_order(self, traced: TracedGraph) -> str:
        told = (
            f"a pipeline needs the same transformer layers in the same order in all steps. The stages were cut for the "
            f"order {list(self.layers)}, and these inputs run the layers in the order {list(traced.layers)}."
        )
        # An assumed partition has the remedy in any error.
        return told if self.assumed else f"{told} {_GIVE_BATCH}"

    @contextmanager
    def remedy_named(self) -> Iterator[None]:
        """Name ``partition_batch`` in a ``ValueError`` of an assumed partition, which does not fit a real trace."""
        try:
            yield
        except ValueError as error:
            if not self.assumed:
                raise
            raise ValueError(
                f"{error}\nThe model could not be traced for example inputs, so the stages follow from an assumed "
                f"order of its modules, and these inputs need another order. {_GIVE_BATCH}"
            ) from error


def make_partition(
    traced: TracedGraph,
    module: nn.Module,
    known_layers: Sequence[str],
    stages: int,
    policy: PartitionPolicy | None = None,
) -> Partition:
    """Cut ``module`` into ``stages``.

    Args:
        traced: a graph of ``module``.
        module: the whole model. Its parameters may be on the meta device.
        known_layers: names of its transformer layers. The graph may leave some out.
        stages: number of stages.
        policy: chooses the cuts. By default ``even``.

    Raises:
        ValueError: for a graph that repeats a layer, and for cuts that do not fit the layers and the stages. Also for
            a last stage without parameters, and for statistics (batch norm) that two stages would change.
    """
    layers = assignment.layers_in_order(traced, known_layers)
    policy = policy or even
    source = getattr(policy, "source", None) or f"partition={getattr(policy, '__qualname__', policy)}"
    cuts = check_cuts(policy(traced, stages), layers, stages, source)
    layer_stages = stages_of_layers(cuts, layers)
    assigned = assignment.assign_nodes(traced, module, layer_stages, stages)
    owners = assignment.parameter_owners(assigned, module)
    if stages - 1 not in layer_stages.values():
        assignment.check_last_stage(owners, stages, layers[-1])
    owners |= assignment.buffer_owners(traced, assigned, module)
    return Partition(module, layer_stages, cuts, owners)


def even(traced: TracedGraph, stages: int) -> list[str]:
    """Policy: stages of even size. The remainder goes to the later ones."""
    return even_cuts(traced.layers, stages)


def reads_layers_alone(policy: PartitionPolicy) -> bool:
    """Return whether ``policy`` reads no more of the graph than the names of its layers."""
    return policy is even or isinstance(policy, GivenCuts)


@dataclass(frozen=True)
class GivenCuts:
    """Policy: cut after the layers that the caller names.

    ``source`` is the argument that named them, for messages.
    """

    cuts: Sequence[str]
    source: str = "pipeline_cuts"

    def __call__(self, traced: TracedGraph, stages: int) -> Sequence[str]:
        """Return the given cuts."""
        return self.cuts


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
            f"{source} has {counted(len(cuts), 'name')}, but {counted(stages, 'stage needs', 'stages need')} "
            f"{counted(stages - 1, 'cut')}. Given: {list(cuts)}; the layers are: {', '.join(layers)}."
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
            f"{counted(len(layers), 'transformer layer')} cannot be split over {stages} pipeline stages: each needs at "
            f"least one. Use at most {counted(len(layers), 'stage')}. The layers are: {', '.join(layers)}."
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

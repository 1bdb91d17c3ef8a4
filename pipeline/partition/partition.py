"""Partition of a model: the stage of every transformer layer, graph node and parameter.

::

    embed   layers.0   layers.1 | layers.2   layers.3   norm   lm_head   loss       cut after layers.1
    └──────── stage 0 ─────────┘ └──────────────── stage 1 ─────────────────┘
    mask, positions, rotary_emb, shapes: on every stage that needs them

``make_partition`` is the one place that makes it. A ``PartitionPolicy`` chooses the cuts: evenly, as given, by cost
(``layer_costs.py``), or by a function of the caller.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

from torch import fx, nn

from nxdpp.pipeline.partition.assignment import (
    Owners,
    assign_nodes,
    buffer_owners,
    check_buffers_have_owners,
    check_last_stage,
    check_layers_ran,
    layers_in_order,
    parameter_owners,
)
from nxdpp.pipeline.partition.cuts import check_cuts, even_cuts, stages_of_layers
from nxdpp.tracing.graph.trace import TracedGraph
from nxdpp.tracing.modules import listings

PartitionPolicy = Callable[[TracedGraph, int], Sequence[str]]
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
    owners: Owners
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

    def owners_by_rank(self, rank_of: Callable[[int], int]) -> Owners:
        """Return the ranks that hold each parameter. ``rank_of`` maps a stage to its rank."""
        return {name: {rank_of(stage) for stage in stages} for name, stages in self.owners.items()}

    def assign(self, traced: TracedGraph) -> dict[fx.Node, int]:
        """Return the stage of each node of another graph of the same model.

        Raises ``ValueError`` where the graph does not run each layer once, in the order of this partition.
        """
        check_layers_ran(traced, self.layers)
        assigned = assign_nodes(traced, self.module, self.layer_stages, self.stages, self.owners)
        if self.assumed:
            check_buffers_have_owners(traced, assigned, self.module, self.owners)
        return assigned

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
                f"order of its modules, and these inputs need another order. Give partition_batch at construction: the "
                f"inputs of one microbatch with labels; meta tensors are allowed."
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
    layers = layers_in_order(traced, known_layers)
    policy = policy or even
    source = getattr(policy, "source", None) or f"partition={getattr(policy, '__qualname__', policy)}"
    cuts = check_cuts(policy(traced, stages), layers, stages, source)
    layer_stages = stages_of_layers(cuts, layers)
    assigned = assign_nodes(traced, module, layer_stages, stages)
    owners = parameter_owners(assigned, module)
    if stages - 1 not in layer_stages.values():
        check_last_stage(owners, stages, layers[-1])
    owners |= buffer_owners(traced, assigned, module)
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

"""``PolicyGraph``: the model that a policy function divides, and the division that it has chosen."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

from torch import nn

from nxdpp.counted import counted
from nxdpp.doors.nnscaler.compute_config import INFERENCE_SCHEDULERS, ComputeConfig, is_whole
from nxdpp.doors.nnscaler.generic_plan import plan_for
from nxdpp.doors.nnscaler.registered_functions import registered_functions
from nxdpp.doors.nnscaler.unit_layout import UnitLayout
from nxdpp.planning.traced_layers import TracedLayers, trace_layers
from nxdpp.schedules.chosen import ChosenSchedule

# ``1f1b_plus`` is ``1f1b`` where no stage is on all ranks.
_OURS = {
    "1f1b": "1f1b",
    "1f1b_plus": "1f1b",
    "gpipe": "gpipe",
    "1f1b_interleaved": "interleaved",
    "infer_pipe": "1f1b",
}
_OF_IRGRAPH = (
    *("assign", "consumers", "full_tensors", "group", "inputs", "multiref", "node", "outputs", "partition"),
    *("producers", "replicate", "select", "sequential", "staging"),
)
_REFUSED = {"chimera_direct": "runs microbatches through the stages in two directions"}


class Names(tuple[str, ...]):
    """Names of parts of a model."""

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse a call: ``nodes()`` of nnScaler's IRGraph returns operations."""
        raise _no_irgraph("nodes()")


def _no_irgraph(name: str) -> ValueError:
    return ValueError(
        f"the policy function calls graph.{name}, an operation of nnScaler's IRGraph on single operations, which nxdpp "
        f"does not have: write it with graph.divide, graph.cut_after and graph.schedule (docs/nnscaler.md#policies)"
    )


class PolicyGraph:
    """Model of a policy function ``(graph, compute_config) -> graph``. The function divides it and returns it.

    ::

        def policy(graph, compute_config):
            graph.divide(2)                                          # over 2 tensor-parallel ranks
            graph.cut_after([graph.layers[1]])                       # 2 stages
            graph.schedule("1f1b", stages=2, microbatches=4)
            return graph                                             # plan_ngpus=4

    Attributes:
        module: the model.
        compute_config: the configuration of ``parallelize``.
        example: its ``dummy_forward_args``.
    """

    def __init__(
        self,
        module: nn.Module,
        dummy_forward_args: Mapping[str, Any],
        compute_config: ComputeConfig,
        layer_classes: Sequence[str] = (),
    ) -> None:
        self.module = module
        self.compute_config = compute_config
        self.example = dummy_forward_args
        self._given_classes = tuple(layer_classes)
        self._tensor = 1
        self._plan: Mapping[str, str] | None = None
        self._cuts: tuple[str, ...] | None = None
        self._pipeline: tuple[str, int, int] | None = None
        self._recomputed: tuple[str, ...] = ()
        self._taken: UnitLayout | None = None

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers in the order of execution. A cut falls after one of them."""
        return self._traced[0].names

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes of the traced graph in the order of execution."""
        return Names(self._traced[0].nodes)

    def __getattr__(self, name: str) -> Any:
        """Refuse operations of nnScaler's IRGraph by name."""
        if name in _OF_IRGRAPH:
            raise _no_irgraph(name)
        raise AttributeError(f"PolicyGraph has no {name!r}: docs/nnscaler.md#policies has its names")

    @property
    def costs(self) -> dict[str, float]:
        """Work of each layer for one sample, in FLOPs of the roofline model, and of the ``head`` if it has any."""
        return {cost.layer: cost.work for cost in self._traced[0].costs}

    def why_no_pipeline(self) -> str | None:
        """Return why there are no layers between which a pipeline could be cut; ``None`` if there are."""
        try:
            return None if len(self.layers) > 1 else f"{type(self.module).__name__} has one layer only"
        except (ValueError, RuntimeError) as error:  # a TracingError is the second
            return str(error)

    @property
    def layer_classes(self) -> tuple[str, ...]:
        """Names of the classes of the layers. Empty for the layers that nxdpp takes by itself."""
        return self._traced[1]

    def take_layers(self, classes: Sequence[str]) -> None:
        """Take the modules of ``classes``, names of classes, for the layers."""
        self._given_classes = tuple(classes)
        self.__dict__.pop("_traced", None)

    def take(self, layout: UnitLayout) -> None:
        """Take a whole layout, such as one from a file.

        Raises ``ValueError`` for a layout with a different number of ranks.
        """
        if layout.ranks != self.compute_config.plan_ngpus:
            raise ValueError(
                f"the layout is for {counted(layout.ranks, 'rank')}, and plan_ngpus is {self.compute_config.plan_ngpus}"
            )
        if layout.pipeline > 1:
            scheduler = default_scheduler(self.compute_config)
            self.compute_config.check_pipeline(layout.pipeline * layout.chunks, layout.microbatches or 0, scheduler)
        self._taken = layout

    def default_plan(self, ranks: int) -> Mapping[str, str] | None:
        """Return the tensor plan of ``divide(ranks)``: ``None`` for the plan of the module's type, or for one rank."""
        return plan_for(self.module, ranks) if ranks > 1 else None

    def divide(self, ranks: int, plan: Mapping[str, str] | None = None) -> None:
        """Share each layer among ``ranks``. What does not divide is computed by each of them.

        Args:
            ranks: number of tensor-parallel ranks, a divisor of ``plan_ngpus``.
            plan: styles as for ``nxdpp.tensor_parallelize``. By default the plan of the model's type, or a generic one.

        Raises ``ValueError`` for a number that does not divide.
        """
        if not is_whole(ranks) or ranks < 1 or self.compute_config.plan_ngpus % ranks:
            raise ValueError(f"divide({ranks!r}) needs a divisor of plan_ngpus={self.compute_config.plan_ngpus}")
        self._tensor = ranks
        self._plan = dict(plan) if plan is not None else self.default_plan(ranks)

    def cut_after(self, names: Sequence[str]) -> None:
        """Cut after the layers ``names``. By default the stages of ``schedule`` have even sizes.

        Raises ``ValueError`` for a name that is not a layer.
        """
        if isinstance(names, str):
            raise TypeError(f"cut_after takes a list of layers, not {names!r}")
        if unknown := [name for name in names if name not in self.layers]:
            raise ValueError(f"cut_after: {', '.join(unknown)} are no layers. The layers are {', '.join(self.layers)}")
        self._cuts = tuple(names)

    def schedule(self, name: str, stages: int, microbatches: int) -> None:
        """Run ``stages`` as a pipeline by the scheduler ``name``, with ``microbatches`` samples in a step."""
        self._pipeline = (name, stages, microbatches)

    def recompute(self, names: Sequence[str]) -> None:
        """Recompute the forward of modules in the backward, instead of keeping their activations.

        ``names`` are names of modules, last parts of these, or classes. Raises ``ValueError`` for one without a module.
        """
        self._recomputed = _modules_named(self.module, names)

    def layout(self) -> UnitLayout:
        """Return the division as a layout of the unit.

        Raises ``ValueError`` for a division that leaves ranks without work, and for a pipeline that cannot run.
        """
        if self._taken is not None:
            return self._taken
        ranks = self.compute_config.plan_ngpus // self._tensor
        if self._pipeline is None:
            if self._cuts:
                raise ValueError("the policy cuts the model and gives no schedule: call graph.schedule")
            if ranks > 1:
                raise ValueError(
                    f"the policy uses {self._tensor} of plan_ngpus={self.compute_config.plan_ngpus} ranks of a unit: "
                    f"divide the rest by graph.divide or graph.schedule, or give plan_ngpus={self._tensor}"
                )
            return UnitLayout(tensor=self._tensor, plan=self._plan, recompute=self._recomputed)
        scheduler, stages, microbatches = self._pipeline
        if above := [name for name in self._recomputed if any(layer.startswith(f"{name}.") for layer in self.layers)]:
            raise ValueError(f"{', '.join(above)} cannot be recomputed in a pipeline: give the layers inside")
        schedule, chunks = _schedule_of(self.compute_config, scheduler, ranks, stages, microbatches)
        return UnitLayout(
            tensor=self._tensor,
            pipeline=ranks,
            chunks=chunks,
            schedule=schedule,
            microbatches=microbatches,
            cuts=self._cuts_for(stages),
            layer_classes=self._traced[1] if stages > 1 else (),
            plan=self._plan,
            recompute=self._recomputed,
        )

    def _cuts_for(self, stages: int) -> tuple[str, ...]:
        if self._cuts is not None:
            if len(self._cuts) != stages - 1:
                raise ValueError(
                    f"{counted(stages, 'stage needs', 'stages need')} {counted(stages - 1, 'cut')}; the policy gives "
                    f"{len(self._cuts)}"
                )
            return self._cuts
        if stages == 1:
            return ()
        if len(self.layers) < stages and not self._given_classes:
            self.__dict__["_traced"] = self._leaves()
        return tuple(self._traced[0].even_cuts(stages))

    @cached_property
    def _traced(self) -> tuple[TracedLayers, tuple[str, ...]]:
        """The layers, and the names of their classes if nxdpp would not take them by itself."""
        if self._given_classes:
            return self._layers_of(self._given_classes), self._given_classes
        try:
            return self._layers_of(None), ()
        except ValueError:
            pass
        try:
            return self._leaves()
        except ValueError as error:
            raise ValueError(
                f"no layers of {type(self.module).__name__} are found between which a pipeline could be cut: {error} "
                f"Use dp or tp, or a policy function that names their classes (graph.take_layers)"
            ) from error

    def _leaves(self) -> tuple[TracedLayers, tuple[str, ...]]:
        """Layers of a model without transformer layers: each module with parameters and without children."""
        leaves = (part for part in self.module.modules() if not [*part.children()] and [*part.parameters()])
        classes = tuple(dict.fromkeys(type(leaf).__name__ for leaf in leaves))
        return self._layers_of(classes), classes

    def _layers_of(self, classes: Sequence[str] | None) -> TracedLayers:
        given = None if classes is None else list(classes)
        functions = registered_functions()
        return trace_layers(self.module, self.example, transformer_layer_cls=given, autowrap_functions=functions)


def _modules_named(module: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    """Return the qualified names of modules whose name, class, or last parts of the name are in ``names``.

    Raises ``ValueError`` for a name without a module.
    """
    found: dict[str, None] = {}
    for name in names:
        matches = [
            path
            for path, part in module.named_modules()
            if path and (f".{path}".endswith(f".{name}") or type(part).__name__ == name)
        ]
        if not matches:
            raise ValueError(f"{type(module).__name__} has no module {name!r}, by its name or its class")
        found |= dict.fromkeys(matches)
    return tuple(found)


def default_scheduler(compute_config: ComputeConfig) -> str:
    """Return the scheduler of a policy that names none."""
    return INFERENCE_SCHEDULERS[0] if compute_config.inference_only else "1f1b"


def known_schedule(scheduler: str) -> str:
    """Return nxdpp's name of ``scheduler``. Raises ``ValueError`` for one that does not exist or cannot run."""
    if scheduler in _REFUSED:
        raise ValueError(f'pipeline_scheduler={scheduler!r} {_REFUSED[scheduler]}, which nxdpp does not: use "1f1b"')
    name = _OURS.get(scheduler, scheduler)
    try:
        ChosenSchedule(name, 1, 1, 1)
    except ValueError as error:
        raise ValueError(
            f"pipeline_scheduler={scheduler!r}: {error} nnScaler's names are {', '.join((*_OURS, *_REFUSED))}"
        ) from error
    return name


def _schedule_of(
    compute_config: ComputeConfig, scheduler: str, ranks: int, stages: int, microbatches: int
) -> tuple[str, int]:
    """Return the schedule and the number of stages per rank of ``scheduler``.

    Raises ``ValueError`` for a pipeline that ``compute_config`` or the schedule does not allow.
    """
    name = known_schedule(scheduler)
    compute_config.check_pipeline(stages, microbatches, scheduler)
    if stages % ranks:
        raise ValueError(
            f"pipeline_nstages={stages} must be a multiple of the {counted(ranks, 'rank')} of the pipeline (pp_size)"
        )
    chunks = stages // ranks
    if name == "interleaved" and chunks == 1:
        name = "1f1b"
    try:
        chosen = ChosenSchedule(name, ranks, microbatches, chunks)
    except ValueError as error:
        raise ValueError(
            f"pipeline_scheduler={scheduler!r} with {counted(stages, 'stage')} on {counted(ranks, 'rank')}: {error}"
        ) from error
    if chosen.placement.chunks != chunks:
        needed = chosen.placement.chunks * ranks
        raise ValueError(
            f"pipeline_scheduler={scheduler!r} has {counted(chosen.placement.chunks, 'stage')} per rank: give "
            f"pipeline_nstages={needed} for {counted(ranks, 'rank')}, not {stages}"
        )
    return name, chunks

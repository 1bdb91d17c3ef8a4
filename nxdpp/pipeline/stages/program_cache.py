"""One program for each spec of inputs: traced and cut once, then kept."""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any

import torch
from torch import fx, nn

from nxdpp.agreement.fingerprint import fingerprint, graph_lines, parameter_lines
from nxdpp.agreement.plain_attributes import configuration_lines
from nxdpp.agreement.step_signature import LastUsed
from nxdpp.ground.torch_names import MODULES
from nxdpp.initialization.meta_copy import meta_copy
from nxdpp.pipeline.local.changes import ENTRIES, ChangeRecord
from nxdpp.pipeline.local.replaced_modules import copy_attributes, copy_modes
from nxdpp.pipeline.partition.partition import Partition
from nxdpp.pipeline.stages.cut_graph import CutGraph, EndsWith, RankStages, StepGraphs
from nxdpp.pipeline.stages.loss import LossSpec
from nxdpp.tracing.graph.errors import TracingError
from nxdpp.tracing.graph.graph_values import compute_the_same
from nxdpp.tracing.graph.modes import Modes, current_modes
from nxdpp.tracing.graph.swap import swapped
from nxdpp.tracing.graph.trace import TracedGraph, TracingOptions, reachable_state, trace
from nxdpp.tracing.modules import listings
from nxdpp.tracing.modules.spine_modules import spine_names
from nxdpp.tracing.sizes.input_specs import InputSpec
from nxdpp.tracing.sizes.sizes import Shapes, Sizes, shapes_of
from nxdpp.tracing.state.read_values import ReadValues
from nxdpp.tracing.state.settings import OF_LAYERS, Settings, SpineSettings
from nxdpp.tracing.state.shared_objects import SharedBuffers
from nxdpp.tracing.values.input_dicts import NUMBERS

_UNKNOWN = object()
_NEVER = -1


@dataclass(frozen=True)
class _Variant:
    """Inputs that one graph is traced for.

    ``traced`` inputs have a spec. ``constants`` have a type, a sign and a value, because 1 is not ``True`` and 0.0 is
    not -0.0. ``modes`` are torch's modes around the model, for which code may ask. ``settings`` are the
    training modes and the attributes of modules above layers, and the number of the other values that their code reads.
    """

    traced: tuple[tuple[str, InputSpec], ...]
    constants: tuple[tuple[str, tuple[type, float], Any], ...]
    training: bool
    modes: Modes
    settings: tuple[Settings, int]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Each step looks for its graph.
        return hash((self.traced, self.constants, self.training, self.modes, self.settings))

    def with_numbers_fixed(self, numbers: Mapping[str, Any]) -> "_Variant":
        """Return the variant in which numbers are part of the graph."""
        traced = tuple(item for item in self.traced if item[0] not in numbers)
        return replace(self, traced=traced, constants=(*self.constants, *_constants(numbers)))

    def with_other_values(self) -> "_Variant":
        """Return the variant without the values and the modes of layers that code reads.

        The stages of a graph hold the modules and buffers of its other settings.
        """
        return replace(self, settings=(tuple(each for each in self.settings[0] if each[0] != OF_LAYERS), 0))


class ProgramCache:
    """Makes and keeps the programs of one rank.

    Construct it while the model is whole: later each rank knows only its own parameters.

    Args:
        partition: of the model. Parameters of other stages may move to the meta device later.
        options: for tracing.
        loss_spec: the output that is the loss.
        stages: this rank's stages.
        settings: other settings that must be equal on all ranks of the pipeline.
        changes: of the model; the graph of present modes and hooks is looked for when it has moved.
    """

    def __init__(
        self,
        partition: Partition,
        options: TracingOptions,
        loss_spec: LossSpec,
        stages: Sequence[int],
        settings: Mapping[str, Any],
        changes: ChangeRecord,
    ) -> None:
        module = partition.module
        self._partition, self._module, self._options, self._changes = partition, module, options, changes
        self._loss_spec, self._local_stages = loss_spec, stages
        self._entries = changes.watch(*ENTRIES)
        self._shared_buffers = SharedBuffers(module, partition.layer_stages)
        self._common = [f"{name}: {value}" for name, value in settings.items()]
        self._common += configuration_lines(module)
        self._common += parameter_lines([*listings.named_parameters(module), *listings.named_buffers(module)])
        # The key has the shapes of the inputs for variants with a graph that depends on sizes, and ``None`` for others.
        self._graphs: LastUsed[tuple[_Variant, Any], CutGraph] = LastUsed()
        # Keys of graphs by a layout of inputs, modes, number of settings, and objects and values that code reads.
        self._of_layouts: LastUsed[Hashable, tuple[_Variant, Any]] = LastUsed()
        self._with_facts: set[_Variant] = set()
        self._fixed: set[_Variant] = set()
        self._of_steps: LastUsed[tuple[RankStages, ...], RankStages] = LastUsed()
        self._as_cut: dict[str, nn.Module] = {}
        self._state: Any = _UNKNOWN
        self._spine_settings = SpineSettings((), ())
        self._last_settings: Settings = ()
        self._settings_at = _NEVER
        self._settings_numbers: LastUsed[Settings, int] = LastUsed()
        self._counter = count()
        self._settings_number = next(self._counter)
        self._read_values: ReadValues | None = None

    def cut_graph(self, inputs: Mapping[str, Any], training: bool) -> CutGraph:
        """Return the graph for a microbatch like ``inputs``, in training or evaluation mode, in this thread's modes.

        Numbers are traced, unless the model's control flow needs them. Raises ``TracingError`` for inputs with which
        the model cannot be traced.
        """
        shapes = shapes_of(inputs)
        tensors = {n: InputSpec(v.ndim, v.dtype) for n, v in inputs.items() if isinstance(v, torch.Tensor)}
        numbers = {n: v for n, v in inputs.items() if isinstance(v, NUMBERS) and not isinstance(v, bool)}
        constants = {n: v for n, v in inputs.items() if n not in tensors and n not in numbers}
        traced = tensors | {n: InputSpec(None, None, type(v)) for n, v in numbers.items()}
        variant = _Variant(
            tuple(sorted(traced.items())), _constants(constants), training, current_modes(), self._settings()
        )
        with self._model_as_cut():
            if numbers and variant not in self._fixed:
                try:
                    return self._kept(variant, shapes)
                except TracingError:
                    self._fixed.add(variant)
            return self._kept(variant.with_numbers_fixed(numbers) if numbers else variant, shapes)

    def _settings(self) -> tuple[Settings, int]:
        """The settings of the spine with the objects that its code reads, and the number of the values it reads."""
        if self._settings_at != self._changes.number:
            self._look_at_settings()
        assert self._read_values is not None, "made with the state"
        number = self._read_values.number
        return (*self._last_settings, (0, "objects", self._read_values.objects)), number

    def _look_at_settings(self) -> None:
        if self._state is _UNKNOWN or (self._spine_settings.of_layers and self._entries.has_moved):
            self._entries.settle()
            layers = self._layers()
            self._state = reachable_state(self._module, self._options, layers)
            names = spine_names(self._module, layers, ())
            spine = [self._module.get_submodule(name) for name in sorted(names)]
            read = () if self._state is None else self._state.names
            asked = () if self._state is None else self._state.asked
            self._spine_settings = SpineSettings(spine, read, self._partition.owners, asked)
            self._last_settings = self._spine_settings.present()
            if self._read_values is None:
                # The first look takes the state that is known.
                known = [self._state]
                self._read_values = ReadValues(
                    spine,
                    lambda: known.pop() if known else reachable_state(self._module, self._options, self._layers()),
                )
        elif self._spine_settings.present() != self._last_settings:
            # Another function may read other attributes.
            self._state = _UNKNOWN
            self._look_at_settings()
            return
        self._settings_number = self._settings_numbers.setdefault(self._last_settings, next(self._counter))
        # The modes of layers of other ranks are not in the record.
        is_followed = self._changes.follows_above(self._spine_settings.spine) and not self._spine_settings.of_layers
        self._settings_at = self._changes.number if is_followed else _NEVER

    def _place(self, layout: Hashable, training: bool, modes: Modes) -> Hashable:
        """The key of ``_of_layouts`` for the present settings."""
        (*_, (_, _, objects)), number = self._settings()
        return layout, training, modes, self._settings_number, objects, number

    def _layers(self) -> list[str]:
        return self._options.layers_of(self._module)

    def graphs_of(self, microbatches: Sequence[Mapping[str, Any]], layout: Hashable = None) -> StepGraphs:
        """Return the graphs of ``microbatches``, whose inputs may differ where a function or images split the batch.

        The graphs are in the model's present mode. Batches of one ``layout`` have microbatches of the same names,
        shapes and dtypes, without other values. Raises as ``cut_graph`` does.
        """
        training = self._module.training
        modes = current_modes()
        key = None if layout is None else self._of_layouts.get(self._place(layout, training, modes))
        known: CutGraph | None = None if key is None else self._graphs.get(key)
        if known is not None:
            return StepGraphs((known,))
        cut = self.cut_graph(microbatches[0], training)
        if layout is not None:
            # A trace may have changed the settings.
            self._of_layouts[self._place(layout, training, modes)] = next(reversed(self._graphs))
        first = signature(microbatches[0])
        cuts = [cut if signature(each) == first else self.cut_graph(each, training) for each in microbatches]
        numbers = {each: number for number, each in enumerate(dict.fromkeys(cuts))}
        return StepGraphs(tuple(numbers), tuple(map(numbers.__getitem__, cuts)) if len(numbers) > 1 else ())

    def program_of(self, graphs: StepGraphs, ends_with: EndsWith) -> RankStages:
        """Return the program of a step of ``graphs``. Raises as ``program`` does."""
        if not graphs.numbers:
            return graphs.cuts[0].programs.get(ends_with) or self.program(graphs.cuts[0], ends_with)
        programs = tuple(self.program(cut, ends_with) for cut in graphs.cuts)
        if programs not in self._of_steps:
            self._of_steps[programs] = RankStages.of_graphs(programs)
        return self._of_steps[programs]

    def program(self, cut: CutGraph, ends_with: EndsWith) -> RankStages:
        """Return the program that ends with the loss, with all values of the output, or with both.

        Raises ``ValueError`` for an output without a loss, and for a stage that needs a value of a later one.
        """
        if ends_with not in cut.programs:
            cut.programs[ends_with] = self._build(cut, ends_with, self._results(cut, ends_with))
        return cut.programs[ends_with]

    def replace(self, modules: Mapping[str, nn.Module]) -> None:
        """Trace with copies of ``modules``, by name, although this rank now runs others in their place.

        Other ranks do not know of a replacement, and all ranks must trace the same graph.
        """
        for name, module in modules.items():
            if name not in self._as_cut:
                self._as_cut[name] = meta_copy(module)
        self.forget()

    def forget(self) -> None:
        """Drop all graphs: modules, buffers or dtypes have changed."""
        self._graphs.clear()
        self._of_layouts.clear()
        self._of_steps.clear()
        self._settings_numbers.clear()
        self._state, self._settings_at = _UNKNOWN, _NEVER
        self._read_values = None
        self._with_facts.clear()

    @contextmanager
    def _model_as_cut(self) -> Iterator[None]:
        asked = frozenset() if self._state in (None, _UNKNOWN) else self._state.asked
        with ExitStack() as stack:
            for name, module in self._as_cut.items():
                parent, _, key = name.rpartition(".")
                modules: dict[str, Any] = MODULES.of(self._module.get_submodule(parent))
                copy_modes(modules[key], module)
                copy_attributes(modules[key], module, asked)
                stack.enter_context(swapped(modules, {key: module}))
            yield

    def _kept(self, variant: _Variant, shapes: Shapes) -> CutGraph:
        by_shapes = variant, tuple(sorted(shapes.items()))
        key = by_shapes if variant in self._with_facts else (variant, None)
        if key in self._graphs:
            return self._graphs[key]
        sizes = Sizes(self._module, shapes)
        graphs = dict.fromkeys(graph for (other, _), graph in self._graphs.items() if other == variant)
        # A graph without facts holds for all shapes, but one whose facts hold was made for such shapes.
        graphs_with_facts_first = sorted(graphs, key=lambda graph: not graph.traced.facts)
        graph = next((graph for graph in graphs_with_facts_first if sizes.hold(graph.traced.facts)), None)
        if graph is None:
            constants = {name: value for name, _, value in variant.constants}
            try:
                traced = trace(self._module, dict(variant.traced), constants, self._options, shapes)
            finally:
                # Transformers adds hooks itself.
                self._changes.take_hooks()
                self._settings_at = _NEVER
            with self._partition.remedy_named():
                graph = self._with_other_values(traced, variant) or CutGraph(traced, self._partition, variant.training)
        if graph.traced.facts:
            self._with_facts.add(variant)
            key = by_shapes
        self._graphs[key] = graph
        return graph

    def _with_other_values(self, traced: TracedGraph, variant: _Variant) -> CutGraph | None:
        """The graph in the cache that differs from ``traced`` only in values or modes that its code reads, if any.

        Its engines stay in use: a value that changes on one rank only needs no step of others. It may be a counter for
        a log, or ``requires_grad`` of this rank's parameters for which the code does not ask.
        """
        for key, graph in self._graphs.items():
            other = graph.traced
            if (
                key[0] != variant
                and key[0].with_other_values() == variant.with_other_values()
                and (other.inputs, other.output_spec) == (traced.inputs, traced.output_spec)
                and self._partition.first_trained >= graph.first_trained
                and compute_the_same(self._module, (other.graph, other.facts), (traced.graph, traced.facts))
            ):
                if key[0].settings[1] != variant.settings[1]:
                    # A counter would fill the cache.
                    del self._graphs[key]
                return graph
        return None

    def _results(self, cut: CutGraph, ends_with: EndsWith) -> list[fx.Node]:
        if ends_with == "loss":
            return [cut.loss(self._loss_spec)]
        if ends_with == "output":
            return cut.results()
        return list(dict.fromkeys([cut.loss_of_sample(self._loss_spec), *cut.results()]))

    def _build(self, cut: CutGraph, ends_with: EndsWith, results: list[fx.Node]) -> RankStages:
        with self._model_as_cut():
            with self._partition.remedy_named():
                plans = cut.plans(results)
            lines = graph_lines(cut.traced, cut.assigned, self._module)
        stages = {stage: cut.build_program(plans[stage], self._shared_buffers) for stage in self._local_stages}
        edges = frozenset((source, plan.stage) for plan in plans for source in plan.received.values())
        mode = f"the {ends_with} in {'training' if cut.training else 'evaluation'} mode"
        graph = fingerprint([mode, *self._common, *lines], self._spine_settings.lines())
        return RankStages(stages, edges, graph, plans[-1].results)


def signature(inputs: Mapping[str, Any]) -> list[Any]:
    """Return the shapes and dtypes of the tensors among ``inputs``, and the other values."""
    return [(n, v.shape, v.dtype) if isinstance(v, torch.Tensor) else (n, v) for n, v in sorted(inputs.items())]


def _constants(values: Mapping[str, Any]) -> tuple[tuple[str, tuple[type, float], Any], ...]:
    return tuple((name, (type(value), _sign(value)), value) for name, value in sorted(values.items()))


def _sign(value: Any) -> float:
    # 0.0 and -0.0 are equal, and give different numbers.
    return math.copysign(1.0, value) if isinstance(value, float) else 1.0

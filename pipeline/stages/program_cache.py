"""One program of a stage for each set of inputs that the model is given, traced once and kept."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from nxdpp.pipeline.agreement.fingerprint import fingerprint, graph_lines, parameter_lines
from nxdpp.pipeline.partition.assignment import (
    Owners,
    buffer_owners,
    check_last_stage,
    check_layers_ran,
    parameter_owners,
    place_nodes,
)
from nxdpp.pipeline.stages.loss import LossSpec, pick_loss
from nxdpp.pipeline.stages.meta_copy import meta_copy
from nxdpp.pipeline.stages.program import RankProgram, StageProgram
from nxdpp.pipeline.stages.split import StagePlan, build_stage, plan_stages
from nxdpp.tracing.containers import is_dataclass_instance, leaves_of, map_leaves
from nxdpp.tracing.errors import TracingError
from nxdpp.tracing.input_specs import InputSpec
from nxdpp.tracing.sizes import Shapes, Sizes, shapes_of
from nxdpp.tracing.swap import swapped
from nxdpp.tracing.trace import TracedGraph, TracingOptions, trace

# Graphs made for sizes of their own are kept for as many shapes as were used last.
_KEPT_SHAPES = 64


@dataclass(frozen=True)
class Variant:
    """The inputs that a graph is traced for: traced ones by kind, the others by type and value (1 is not ``True``)."""

    traced: tuple[tuple[str, InputSpec], ...]
    constants: tuple[tuple[str, type, Any], ...]
    training: bool

    def with_numbers_fixed(self, numbers: Mapping[str, float]) -> "Variant":
        """The variant in which numbers are part of the graph."""
        traced = tuple(item for item in self.traced if item[0] not in numbers)
        return Variant(traced, (*self.constants, *_constants(numbers)), self.training)


@dataclass(eq=False)
class TracedVariant:
    """A graph with the stage of each of its nodes; ``output`` is the model's output made of nodes.

    ``plans`` are those of all stages, ``programs`` this rank's, by what they end with.
    """

    traced: TracedGraph
    placed: dict[fx.Node, int]
    output: Any
    training: bool
    plans: dict[str, list[StagePlan]] = field(default_factory=dict)
    programs: dict[str, RankProgram] = field(default_factory=dict)


class ProgramCache:
    """Makes the programs of one rank.

    Args:
        module: the model; parameters of other stages may be on the meta device.
        options: how to trace.
        loss_spec: which output is the loss.
        stages: this rank's stages.
        settings: what else must be alike on all ranks of the pipeline.
    """

    def __init__(
        self,
        module: nn.Module,
        options: TracingOptions,
        loss_spec: LossSpec,
        stages: Sequence[int],
        settings: Mapping[str, Any],
    ) -> None:
        self._module = module
        self._common = [f"{name}: {value}" for name, value in settings.items()]
        self._layer_stages: Mapping[str, int] = {}
        self._stages = 0
        self._options = options
        self._loss_spec = loss_spec
        self._local_stages = stages
        self._owners: Owners | None = None
        self._variants: dict[Variant, list[TracedVariant]] = {}
        self._by_shapes: OrderedDict[Any, TracedVariant] = OrderedDict()
        self._fixed: set[Variant] = set()
        self._as_cut: dict[str, nn.Module] = {}

    def trace(self, variant: Variant, shapes: Shapes) -> TracedGraph:
        """The graph for ``variant``, and for inputs of ``shapes`` where the model's code asks for sizes."""
        constants = {name: value for name, _, value in variant.constants}
        return trace(self._module, dict(variant.traced), constants, self._options, shapes)

    def place(self, first: TracedGraph, layer_stages: Mapping[str, int], stages: int | None = None) -> Owners:
        """Decide by the ``first`` graph which stages hold which parameter; modules run there from now on.

        ``layer_stages`` is the stage of each transformer layer, in order; ``stages`` the number of stages, by
        default those that have layers. Raises ``ValueError`` where the last stage would have no parameters.
        """
        self._layer_stages = layer_stages
        # Now, while the model is whole: later each rank knows the truth about its own parameters only.
        self._common += parameter_lines([*self._module.named_parameters(), *self._module.named_buffers()])
        self._stages = max(layer_stages.values()) + 1 if stages is None else stages
        placed = place_nodes(first, self._module, layer_stages, number=self._stages)
        self._owners = parameter_owners(placed, self._module)
        if self._stages - 1 not in layer_stages.values():
            check_last_stage(self._owners, self._stages, list(layer_stages)[-1])
        self._owners |= buffer_owners(first, placed, self._module)
        return self._owners

    def replace(self, modules: Mapping[str, nn.Module]) -> None:
        """Others run in the place of ``modules``, by name; graphs are still traced as with these.

        The other ranks know nothing of a replacement, and all must have the same graph.
        """
        for name, module in modules.items():
            if name not in self._as_cut:
                self._as_cut[name] = meta_copy(module)
        self.forget_modules()

    @contextmanager
    def _model_as_cut(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name, module in self._as_cut.items():
                parent, _, key = name.rpartition(".")
                modules: dict[str, Any] = self._module.get_submodule(parent)._modules
                module.train(modules[key].training)
                stack.enter_context(swapped(modules, {key: module}))
            yield

    def _placed(self, variant: Variant, shapes: Shapes) -> TracedVariant:
        """The graph that is kept for inputs like these, or a new one."""
        graphs = self._variants.setdefault(variant, [])
        if len(graphs) == 1 and not graphs[0].traced.facts:
            return graphs[0]
        key = variant, tuple(sorted(shapes.items()))
        if key not in self._by_shapes:
            sizes = Sizes(self._module, shapes)
            placed = next((graph for graph in graphs if sizes.hold(graph.traced.facts)), None)
            if placed is None:
                placed = self._place(variant, shapes)
                graphs.append(placed)
            self._by_shapes[key] = placed
        self._by_shapes.move_to_end(key)
        self._forget_oldest()
        return self._by_shapes[key]

    def _place(self, variant: Variant, shapes: Shapes) -> TracedVariant:
        traced = self.trace(variant, shapes)
        check_layers_ran(traced, list(self._layer_stages))
        placed = place_nodes(traced, self._module, self._layer_stages, self._owners, self._stages)
        (values,) = next(node.args for node in traced.graph.nodes if node.op == "output")
        output = pytree.tree_unflatten(list(values), traced.output_spec)
        return TracedVariant(traced, placed, output, variant.training)

    def _forget_oldest(self) -> None:
        if len(self._by_shapes) > _KEPT_SHAPES:
            (variant, _), oldest = self._by_shapes.popitem(last=False)
            if oldest not in self._by_shapes.values():
                self._variants[variant].remove(oldest)

    def forget_modules(self) -> None:
        """Trace and build anew: buffers that the programs hold have been replaced, or dtypes have changed."""
        self._variants.clear()
        self._by_shapes.clear()

    def forget_engines(self) -> None:
        """Have the stages describe to each other anew what crosses."""
        for variants in self._variants.values():
            for variant in variants:
                for program in variant.programs.values():
                    program.engines.clear()

    def for_inputs(self, inputs: Mapping[str, Any], training: bool) -> TracedVariant:
        """The graph for a microbatch like this; numbers are traced, unless the model needs to know them."""
        with self._model_as_cut():
            return self._for_inputs(inputs, training)

    def _for_inputs(self, inputs: Mapping[str, Any], training: bool) -> TracedVariant:
        shapes = shapes_of(inputs)
        tensors = {n: InputSpec(v.ndim, v.dtype) for n, v in inputs.items() if isinstance(v, torch.Tensor)}
        numbers = {n: v for n, v in inputs.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        constants = {n: v for n, v in inputs.items() if n not in tensors and n not in numbers}
        traced = tensors | {n: InputSpec(None, None, type(v)) for n, v in numbers.items()}
        variant = Variant(tuple(sorted(traced.items())), _constants(constants), training)
        if numbers and variant not in self._fixed:
            try:
                return self._placed(variant, shapes)
            except TracingError:
                self._fixed.add(variant)
        return self._placed(variant.with_numbers_fixed(numbers) if numbers else variant, shapes)

    def loss_program(self, variant: TracedVariant) -> RankProgram:
        """The program that ends with the loss. Raises ``ValueError`` where the output has none."""
        if "loss" not in variant.programs:
            loss = pick_loss(variant.output, self._loss_spec)
            if not isinstance(loss, fx.Node):
                raise ValueError(f"the model's loss is the constant {loss!r}; there is nothing to train.")
            variant.programs["loss"] = self._build(variant, "loss", [loss])
        return variant.programs["loss"]

    def has_named_loss(self, variant: TracedVariant) -> bool:
        """Whether the output names a loss; a lone value may be one, which only its shape tells."""
        if self._loss_spec is None and not (
            isinstance(variant.output, Mapping) or is_dataclass_instance(variant.output)
        ):
            return False
        try:
            return isinstance(pick_loss(variant.output, self._loss_spec), fx.Node)
        except ValueError:
            return False

    def output_program(self, variant: TracedVariant) -> RankProgram:
        """The program that ends with all values of the output."""
        if "output" not in variant.programs:
            values = [leaf for leaf in leaves_of(variant.output) if isinstance(leaf, fx.Node)]
            variant.programs["output"] = self._build(variant, "output", list(dict.fromkeys(values)))
        return variant.programs["output"]

    def _build(self, variant: TracedVariant, ends_with: str, results: list[fx.Node]) -> RankProgram:
        with self._model_as_cut():
            if ends_with not in variant.plans:
                variant.plans[ends_with] = plan_stages(
                    variant.traced, self._module, variant.placed, results, self._stages
                )
            lines = graph_lines(variant.traced, variant.placed, self._module)
        plans = variant.plans[ends_with]
        stages = {
            stage: StageProgram(plans[stage], build_stage(plans[stage], variant.traced, self._module, variant.placed))
            for stage in self._local_stages
        }
        edges = frozenset((maker, plan.stage) for plan in plans for maker in plan.received.values())
        mode = f"the {ends_with} in {'training' if variant.training else 'evaluation'} mode"
        return RankProgram(stages, edges, fingerprint([mode, *self._common, *lines]), plans[-1].results)


def _constants(values: Mapping[str, Any]) -> tuple[tuple[str, type, Any], ...]:
    return tuple((name, type(value), value) for name, value in sorted(values.items()))


def fill_output(output: Any, values: Mapping[str, Any]) -> Any:
    """``output`` with each node replaced by the value of its name."""
    return map_leaves(lambda leaf: values[leaf.name] if isinstance(leaf, fx.Node) else leaf, output)

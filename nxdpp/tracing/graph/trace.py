"""Trace a module to one graph.

::

    trace(module, {"input_ids": InputSpec(2, torch.int64), "labels": InputSpec(2, torch.int64)}, ...)

    input_ids ── embed_tokens ── layers.0 ── layers.1 ── ... ── norm ── lm_head ── loss ── output
             └── mask, positions, rotary_emb ──┴───────────┘             labels ───┘

Every module that does not contain a transformer layer is one node.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import fx, nn

from nxdpp.counted import counted
from nxdpp.ground.torch_names import pytree
from nxdpp.tracing.graph.absent_values import Absence
from nxdpp.tracing.graph.derivatives import refuse_derivatives
from nxdpp.tracing.graph.entry import Entry
from nxdpp.tracing.graph.errors import TracingError, calling_line, model_line, source_line
from nxdpp.tracing.graph.graph_values import compute_the_same
from nxdpp.tracing.graph.remedies import drawn_input, remedy, remedy_for_constants
from nxdpp.tracing.graph.spine import SpineTracer
from nxdpp.tracing.graph.told_once import warn_of_unused_numbers
from nxdpp.tracing.models.captured_outputs import lasting_hooks
from nxdpp.tracing.models.huggingface import HuggingFaceTracer, refuse_untraceable
from nxdpp.tracing.models.loss_function import LossFunction
from nxdpp.tracing.models.transformers_models import transformers_models
from nxdpp.tracing.modules import listings
from nxdpp.tracing.modules.layers import are_declared, declared_around, is_instance, layer_names
from nxdpp.tracing.modules.spine_modules import refuse_backward_hooks, spine_names
from nxdpp.tracing.sizes.answering_tracer import Answers
from nxdpp.tracing.sizes.input_specs import InputSpec
from nxdpp.tracing.sizes.sizes import Fact, Shapes, shapes_of
from nxdpp.tracing.state.reachable_state import ReachableState, has_user_code
from nxdpp.tracing.state.second_run import Run, refuse_differences
from nxdpp.tracing.values.hidden_changes import refuse_hidden_changes
from nxdpp.tracing.values.input_dicts import open_inputs, reads_dict
from nxdpp.tracing.values.lost_changes import ROOT, refuse_lost_changes


@dataclass(frozen=True)
class TracingOptions:
    """Options of a trace. ``tracer_cls`` is ``"hf"``, ``"torch"``, a tracer class, or ``None`` for the spine tracer.

    ``cut_modules`` are names of modules that are not layers, but are traced as layers, because a cut follows them.
    ``loss_function`` makes the loss of the module's output; by default the output has it.
    """

    layer_classes: tuple[type[nn.Module], ...]
    leaf_classes: tuple[type[nn.Module], ...] = ()
    autowrap_functions: tuple[Any, ...] = ()
    autowrap_modules: tuple[ModuleType, ...] = ()
    tracer_cls: str | type[fx.Tracer] | None = None
    cut_modules: tuple[str, ...] = ()
    loss_function: LossFunction | None = None

    def layers_of(self, module: nn.Module) -> list[str]:
        """Names of the modules of ``module`` that a cut may follow: its layers, and ``cut_modules``."""
        return layer_names(module, self.layer_classes, self.cut_modules)

    @property
    def traces_the_spine(self) -> bool:
        """``True`` for the tracer of this package, ``False`` for plain fx and a tracer of the user."""
        return self.tracer_cls in (None, "hf")


@dataclass(frozen=True)
class TracedGraph:
    """A graph whose ``call_module`` and ``get_attr`` targets are qualified names of the traced module.

    ``inputs`` are the graph's inputs in order. ``output_spec`` builds the module's output from the values of the
    output node. The graph belongs to inputs of sizes for which ``facts`` hold. ``state`` is the state in Python
    objects that code of the user in the spine can reach; ``None`` without such code. ``loss`` is the call of the
    options' loss function. Without it the function needs the inputs ``lacking_for_loss``, or there is no function.
    """

    graph: fx.Graph
    inputs: tuple[str, ...]
    output_spec: pytree.TreeSpec
    layers: tuple[str, ...]
    facts: tuple[Fact, ...] = ()
    state: ReachableState | None = None
    loss: fx.Node | None = None
    lacking_for_loss: tuple[str, ...] = ()


def trace(
    module: nn.Module,
    inputs: Mapping[str, InputSpec],
    constants: Mapping[str, Any],
    options: TracingOptions,
    shapes: Shapes | None = None,
    guess: bool | None = None,
) -> TracedGraph:
    """Trace ``module(**inputs, **constants)``; the module is unchanged afterwards, and may be on the meta device.

    ``inputs`` has the specs of the traced inputs, the inputs of a loss function too. The values of ``constants`` are
    part of the graph (``None``, booleans, strings). ``shapes`` are for code that asks for sizes. ``guess`` is the
    answer to questions about inputs of unknown shape. The graph then shows the order of the modules, and cannot be run.
    By default such a question is an error.

    Raises ``TracingError`` with the line of the model that cannot be traced, and the remedy.
    """
    arguments = (module, inputs, constants, options, shapes or {}, guess)
    if (traced := _trace(*arguments, Absence.OPEN)) is not None:
        return traced
    is_inside = bool(declared_around(module, options.layers_of(module)))
    traced = _trace(*arguments, Absence.REFUSED if is_inside else Absence.CHECKED)
    assert traced is not None
    return traced


def _trace(
    module: nn.Module,
    inputs: Mapping[str, InputSpec],
    constants: Mapping[str, Any],
    options: TracingOptions,
    shapes: Shapes,
    guess: bool | None,
    absence: Absence,
) -> TracedGraph | None:
    """The graph; ``None`` for an open trace of code that asks whether a value is there, or that fails with it."""
    layers = options.layers_of(module)
    spine = spine_names(module, layers, options.leaf_classes)
    all_inputs, all_constants = inputs, constants
    if options.loss_function is not None:
        inputs, constants = (options.loss_function.of_module(module, given) for given in (inputs, constants))

    def make_tracer(absence: Absence = absence) -> fx.Tracer:
        return _make_tracer(module, constants, options, spine, shapes, guess, absence)

    def run(tracer: fx.Tracer) -> Run:
        entry = Entry(module, inputs, constants, tracer, namespaces)
        graph = tracer.trace(entry)
        assert entry.output_spec is not None
        if not isinstance(tracer, SpineTracer):
            return Run(graph, (), entry.output_spec)
        tracer.finished = True
        return Run(graph, tuple(tracer.facts), entry.output_spec)

    tracer = make_tracer()
    is_open = absence is Absence.OPEN and guess is None
    undecided: list[fx.Node] = getattr(tracer, "may_be_absent", []) if is_open else []
    state = reachable_state(module, options, layers)
    namespaces = [] if state is None else list({id(f.__globals__): f.__globals__ for f in state.functions}.values())
    with ExitStack() as stack:
        stack.enter_context(lasting_hooks())
        before = None if state is None else stack.enter_context(state.put_back())
        try:
            traced = run(tracer)
        except Exception as error:
            if undecided:
                return None  # code may have used a value that is None
            failed = TracingError(_explain(module, inputs, error, tracer, layers))
            failed.reached = _reached(tracer)
            failed.reads_dict = reads_dict(getattr(tracer, "graph", None), error)
            raise failed from error
        graph = traced.graph
        if undecided and (state is not None or not _hands_on(undecided, module, spine, options)):
            with nullcontext() if state is None else state.put_back():
                if _asks_for_none(module, traced, tracer, make_tracer(Absence.NONE), run):
                    return None
        refuse_lost_changes(graph)
        if isinstance(tracer, SpineTracer) and guess is None:
            refuse_hidden_changes(graph, module, layers, tracer.changed_by)
        _refuse_constants(module, graph, tracer)
        if state is not None and before is not None:
            again = make_tracer()
            if isinstance(again, SpineTracer) and isinstance(tracer, SpineTracer):
                again.answers = Answers(tracer.answers)
            refuse_differences(module, state, before, traced, lambda: run(again))
            if guess is None:
                warn_of_unused_numbers(graph, {fact.node for fact in traced.facts})
    _name_after_module(graph)
    known = set(layers)
    refuse_derivatives(graph, known)
    called = tuple(node.target for node in graph.nodes if node.op == "call_module" and node.target in known)
    result = TracedGraph(graph, tuple(inputs), traced.output_spec, called, traced.facts, state)
    if options.loss_function is None:
        return result
    if lacking := options.loss_function.lacking([*all_inputs, *all_constants]):
        return replace(result, lacking_for_loss=lacking)
    loss = options.loss_function.add_to(graph, traced.output_spec, all_inputs, all_constants, module)
    names = tuple(str(node.target) for node in graph.nodes if node.op == "placeholder")
    return replace(result, inputs=names, loss=loss)


def _hands_on(values: list[fx.Node], module: nn.Module, spine: set[str], options: TracingOptions) -> bool:
    """Return whether code of transformers, above layers that its models declare, gives ``values`` to layers alone.

    For each type ``python -m tools.zoo training`` shows that such code does not ask whether they are ``None``.
    """
    if any(user.op not in ("call_module", "output") for value in values for user in value.users):
        return False
    return are_declared(options.layer_classes, transformers_models(module, spine).values())


def _asks_for_none(
    module: nn.Module, first: Run, tracer: fx.Tracer, without: fx.Tracer, run: Callable[[fx.Tracer], Run]
) -> bool:
    """Return whether the run of ``tracer`` without the values that may be ``None`` has another graph, or fails."""
    assert isinstance(tracer, SpineTracer)
    assert isinstance(without, SpineTracer)
    without.answers = Answers(tracer.answers)
    try:
        second = run(without)
    except Exception:
        return True
    root = nn.Module()
    root.add_module(ROOT, module)
    absent = {*tracer.may_be_absent, *without.may_be_absent}
    return not compute_the_same(root, (first.graph, first.facts), (second.graph, second.facts), absent)


def trace_for(module: nn.Module, inputs: Mapping[str, Any], options: TracingOptions) -> TracedGraph:
    """Trace ``module`` for inputs like the given ones: tensors are traced, other values become constants.

    Tensors may be on the meta device. Raises as ``trace`` does.
    """
    inputs = open_inputs(inputs, all_kinds=True)
    specs = {name: InputSpec(v.ndim, v.dtype) for name, v in inputs.items() if isinstance(v, torch.Tensor)}
    constants = {name: value for name, value in inputs.items() if name not in specs}
    return trace(module, specs, constants, options, shapes_of(inputs))


def reachable_state(module: nn.Module, options: TracingOptions, layers: list[str]) -> ReachableState | None:
    """The state that code of the user above ``layers`` can reach, or ``None`` without such code."""
    if options.traces_the_spine:
        spine = [module.get_submodule(name) for name in sorted(spine_names(module, layers, options.leaf_classes))]
    else:
        inside = {part for name in layers for part in listings.modules(module.get_submodule(name))}
        spine = [part for part in listings.modules(module) if part not in inside]
    return ReachableState(spine) if has_user_code(spine) else None


def _make_tracer(
    module: nn.Module,
    constants: Mapping[str, Any],
    options: TracingOptions,
    spine: set[str],
    shapes: Shapes,
    guess: bool | None,
    absence: Absence,
) -> fx.Tracer:
    wraps: dict[str, Any] = {
        "autowrap_modules": (math, *options.autowrap_modules),
        "autowrap_functions": options.autowrap_functions,
    }
    refuse_backward_hooks(module, spine)
    if options.traces_the_spine:
        if transformers_models(module, spine):
            refuse_untraceable(module, spine, constants)
            return HuggingFaceTracer(spine, shapes, guess, absence, **wraps)
        return SpineTracer(spine, shapes, guess, absence, **wraps)
    base = fx.Tracer if options.tracer_cls == "torch" else options.tracer_cls
    assert isinstance(base, type)
    try:
        return _with_leaves(base, options)(**wraps)
    except TypeError as error:
        raise TypeError(
            f"tracer_cls={base.__name__} could not be made with autowrap_modules and autowrap_functions, the arguments "
            f"of torch.fx.Tracer, which it must take: {error}"
        ) from error


def _with_leaves(base: type[fx.Tracer], options: TracingOptions) -> type[fx.Tracer]:
    leaves = options.layer_classes + options.leaf_classes

    class WithLeaves(base):  # type: ignore[misc, valid-type]  # a class that is known only at run time
        proxy_buffer_attributes = True

        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            is_leaf = is_instance(m, leaves) or module_qualified_name.removeprefix(f"{ROOT}.") in options.cut_modules
            return is_leaf or super().is_leaf_module(m, module_qualified_name)

        def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
            node = super().create_node(*args, **kwargs)
            node.stack_trace = node.stack_trace or calling_line()
            return node  # type: ignore[no-any-return]  # of the base, which mypy does not know

    return WithLeaves


def _refuse_constants(module: nn.Module, graph: fx.Graph, tracer: fx.Tracer) -> None:
    constants = [n for n in graph.nodes if n.op == "get_attr" and not str(n.target).startswith(f"{ROOT}.")]
    if constants:
        made = [getattr(tracer.root, str(node.target), None) for node in constants]
        advice = remedy_for_constants(made, any_tracer=not isinstance(tracer, SpineTracer))
        raise TracingError(
            f"{type(module).__name__}.forward makes {counted(len(constants), 'tensor')} outside the transformer layers "
            f"({constants[0].target}), which a graph would keep as constants\n"
            f"  at {model_line(constants[0].stack_trace)}\n{advice}"
        )


def _reached(tracer: fx.Tracer) -> tuple[str, ...]:
    graph: fx.Graph | None = getattr(tracer, "graph", None)
    if graph is None:
        return ()
    _name_after_module(graph)
    return tuple(dict.fromkeys(str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")))


def _name_after_module(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.op in ("call_module", "get_attr"):
            node.target = node.target.removeprefix(f"{ROOT}.")


def _explain(
    module: nn.Module, inputs: Mapping[str, InputSpec], error: Exception, tracer: fx.Tracer, layers: list[str]
) -> str:
    told = (
        f"{type(module).__name__} could not be traced with the inputs {list(inputs)}: {type(error).__name__}: "
        f"{error}\n  at {source_line(error.__traceback__)}\n"
    )
    parameters = inspect.signature(module.forward).parameters.values()
    if not inputs and (optional := [each.name for each in parameters if each.default is not each.empty]):
        return (
            f"{told}All inputs of forward are optional, {optional}, and it was given none. Give those that it needs by "
            f"name, to the step (run_train({optional[0]}=...)) or in partition_batch."
        )
    if name := drawn_input(error, module, [each.name for each in parameters if each.name not in inputs]):
        example = ", ".join(f'"{each}": ...' for each in (*inputs, name))
        told += (
            f"{name} is an input of forward, and is drawn as it was not given. Where each step gives it, give it here "
            f"too, in one microbatch: NxDPPModel(..., partition_batch={{{example}}}). "
        )
    around = declared_around(module, layers)
    return (told + remedy(error, any_tracer=not isinstance(tracer, SpineTracer), around=around)).rstrip()

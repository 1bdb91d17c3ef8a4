"""A second run of the spine, with the layers stubbed: a difference between two runs would be lost in a graph.

A trace runs the spine once, and every step then repeats that run. State and random numbers in Python would stay as
in the trace for ever. So the trace runs the spine twice, one run after the other, and compares:

=====================================  =======================================================================
in the second run                      meaning
=====================================  =======================================================================
another graph                          a counter, a random number, the time
a traced value of the first run        a value of one step is used in the next
other Python objects, the same graph   a counter that code compares with a limit; a warning if code only writes it
=====================================  =======================================================================
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from torch import fx, nn

from nxdpp.ground.torch_names import pytree
from nxdpp.tracing.code.reads import is_read, writing_line
from nxdpp.tracing.graph.errors import StaleValueError, TracingError, model_line, source_line
from nxdpp.tracing.graph.graph_values import ForeignNodeError, ValueNumbers
from nxdpp.tracing.sizes.sizes import Fact
from nxdpp.tracing.state.reachable_state import ChangedState, ReachableState, differences
from nxdpp.tracing.state.state_walk import StateWalk
from nxdpp.tracing.values.lost_changes import ROOT

_logger = logging.getLogger(__name__)

_REMEDY = (
    "Move it into a layer, or into a module without layers, which runs as one node in each step (for a counter: a "
    "buffer of it); or give it to forward as an input."
)


@dataclass(frozen=True)
class Run:
    """The graph of one run, its facts and the structure of its output."""

    graph: fx.Graph
    facts: tuple[Fact, ...]
    output_spec: pytree.TreeSpec


def refuse_differences(
    module: nn.Module, state: ReachableState, before: StateWalk, first: Run, run_again: Callable[[], Run]
) -> None:
    """Run the spine a second time and compare it with the ``first`` run, whose values must be used no more.

    ``before`` is the state before that run. ``run_again`` traces the module again. Raises ``TracingError`` for a
    difference, with the line of the model.
    """
    # The graphs' names begin with the name of the traced module.
    root = nn.Module()
    root.add_module(ROOT, module)
    numbers = ValueNumbers(root)
    first_numbers = numbers.of(first.graph)
    state.clear_caches()
    between = state.snapshot()
    name = type(module).__name__
    try:
        second = run_again()
        second_numbers = numbers.of(second.graph)
    except ForeignNodeError as error:
        raise TracingError(_refusal_of_kept(name, between, model_line(error.node.stack_trace))) from None
    except Exception as error:
        line = source_line(error.__traceback__)
        if isinstance(error, StaleValueError) or "multiple different tracers" in str(error):
            raise TracingError(_refusal_of_kept(name, between, line)) from error
        raise TracingError(
            f"{name}.forward differs in two runs: the first ran through, the second raised {type(error).__name__}: "
            f"{error}\n  at {line}\n{_REMEDY}"
        ) from error
    if first_numbers.results(first.facts) != second_numbers.results(second.facts):
        here, there = first_numbers.first_not_in(second_numbers), second_numbers.first_not_in(first_numbers)
        node = here or there
        raise TracingError(
            f"{name}.forward differs in two runs: {_shown(here)} in the first, {_shown(there)} in the second; each "
            f"step would repeat the first\n  at {model_line(node.stack_trace if node else None)}\n{_REMEDY}"
        )
    after = state.snapshot()
    _refuse_changes(name, state, [*differences(between, after), *filter(_is_counted, differences(before, between))])
    if first.output_spec != second.output_spec:
        raise TracingError(
            f"{name}.forward differs in two runs: its outputs have the structures {first.output_spec} and "
            f"{second.output_spec}; each step would repeat the first\n  at {_output_line(first.graph)}\n{_REMEDY}"
        )


def _refusal_of_kept(name: str, state: StateWalk, line: str) -> str:
    """The message for the use of a traced value of the first run, which ``state`` still holds."""
    places = ", ".join(sorted(set(state.traced.values()))) or "an object of Python"
    return (
        f"{name}.forward uses a value of an earlier step, which it keeps in {places}; a pipeline keeps no values "
        f"of a step for the next one\n  at {line}\n"
        f"Keep it in a layer, or in a module without layers, which runs as one node in each step. A table that follows "
        f"from no input is a buffer of __init__ (self.register_buffer(name, table, persistent=False))."
    )


def _refuse_changes(name: str, state: ReachableState, changes: list[ChangedState]) -> None:
    for change in changes:
        if is_read(change.name, state.functions):
            raise TracingError(
                f"{name}.forward differs in two runs: {change} changes, and its code reads it; each step would repeat "
                f"the first run\n  at {writing_line(change.name, state.functions)}\n{_REMEDY}"
            )
    for change in changes:
        _warn_of_lost(name, change.name)


@cache
def _warn_of_lost(name: str, path: str) -> None:
    _logger.warning(
        "%s.forward changes %s, and its code does not read it. In a pipeline it stays as it is. Return the value from "
        "forward, or keep it in a module without layers.",
        name,
        path,
    )


def _is_counted(change: ChangedState) -> bool:
    """Return whether a number has changed, or a generator has drawn."""
    contents = (change.before, change.after)
    return all(isinstance(content, tuple) and content[0] in (int, float, "a generator") for content in contents)


def _shown(node: fx.Node | None) -> str:
    if node is None:
        return "nothing in its place"
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.target)
    constants = [str(argument) for argument in (*node.args, *node.kwargs.values())]
    return f"{target}({', '.join(constants)})"[:200]


def _output_line(graph: fx.Graph) -> str:
    output = next(iter(reversed(graph.nodes)))
    lines = [node.stack_trace for node in output.all_input_nodes if node.stack_trace]
    return model_line(lines[-1] if lines else None)

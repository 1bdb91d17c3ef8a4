"""Partition at construction, before a step gives real inputs.

=====================================================  =====================================================
trace for example inputs                               partition
=====================================================  =====================================================
succeeds                                               of its graph
asks for sizes of inputs of unknown shape, or fails    of a graph in which such questions are guessed: it
for a guessed kind of input                            has the modules in the order of execution
fails with guesses too, in the model's own code        of the modules that a trace reached, in its order, and
                                                       the others in the order of their registration
meets a construct that no shapes make traceable        none: the error is raised
=====================================================  =====================================================

The second and the third one are assumptions. The first trace for real inputs verifies them (``Partition.assumed``).
"""

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from nxdpp.pipeline.partition.partition import Partition, PartitionPolicy, make_partition, reads_layers_alone
from nxdpp.tracing.graph.errors import TRACING, TracingError
from nxdpp.tracing.graph.registration import graph_by_registration
from nxdpp.tracing.graph.trace import TracedGraph, TracingOptions, trace
from nxdpp.tracing.sizes.example_inputs import example_shapes, example_specs
from nxdpp.tracing.sizes.input_specs import UNKNOWN, InputSpec
from nxdpp.tracing.sizes.sizes import Shapes, WrongShapesError
from nxdpp.tracing.values.input_dicts import open_inputs

# Files that raise the error of a construct that no graph can hold.
_TRACERS = (TRACING, "/torch/fx/")


def first_partition(
    module: nn.Module,
    options: TracingOptions,
    stages: int,
    policy: PartitionPolicy,
    input_names: Sequence[str] | None = None,
    batch: Mapping[str, Any] | None = None,
) -> Partition:
    """Trace ``module`` for example inputs, or for ``batch``, and cut it into ``stages``.

    Raises ``TracingError`` for a model that cannot be traced, and ``ValueError`` as ``make_partition`` does.
    """
    opened = open_inputs(batch or {}, all_kinds=True)
    constants = {name: value for name, value in opened.items() if not isinstance(value, torch.Tensor)}
    tensors = None if batch is None else {name: value for name, value in opened.items() if name not in constants}
    specs = example_specs(module, input_names, tensors)
    shapes = example_shapes(module, specs, tensors)
    layers = options.layers_of(module)
    try:
        traced = trace(module, specs, constants, options, shapes)
    except TracingError as error:
        if batch is not None or not options.traces_the_spine:
            raise
        traced = _assumed_graph(module, specs, shapes, options, policy, error)
        return replace(make_partition(traced, module, layers, stages, policy), assumed=True)
    return make_partition(traced, module, layers, stages, policy)


def _assumed_graph(
    module: nn.Module,
    specs: Mapping[str, InputSpec],
    shapes: Shapes,
    options: TracingOptions,
    policy: PartitionPolicy,
    reason: TracingError,
) -> TracedGraph:
    """Return a graph with the modules in a likely order. Raise ``TracingError`` where no inputs could be traced."""
    attempts = [(specs, shapes, False), (specs, shapes, True)]
    if shapes:
        # The likely kinds of these inputs may be wrong, too.
        attempts.append((dict.fromkeys(specs, UNKNOWN), {}, False))
    reached = reason.reached
    for attempted, known, guess in attempts:
        try:
            return trace(module, attempted, {}, options, known, guess)
        except TracingError as error:
            if _is_a_construct(error):
                raise error from reason
            reached = max(reached, error.reached, key=len)
    if not reads_layers_alone(policy):
        raise ValueError(
            f"partition={getattr(policy, '__qualname__', policy)} reads the traced graph, and this model cannot be "
            f"traced before its inputs are known. Give partition_batch: the inputs of one microbatch with labels. "
            f"{reason}"
        ) from reason
    return graph_by_registration(module, list(specs), options, reached)


def _is_a_construct(error: TracingError) -> bool:
    if error.reads_dict:
        # The inputs of the first step have its keys.
        return False
    if error.__cause__ is None:
        return True
    if isinstance(error.__cause__.__cause__, WrongShapesError):
        # The inputs of the first step have other shapes, or fail in the unwrapped model too.
        return False
    *_, last = traceback.extract_tb(error.__cause__.__traceback__)
    return any(part in last.filename for part in _TRACERS)

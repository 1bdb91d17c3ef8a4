"""Note on an index error of a stage: the ranges of the integer inputs, and the embedding that one exceeds."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from nxdpp.pipeline.stages.cut_graph import StageProgram

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def note_ranges(error: IndexError, inputs: Mapping[str, Any], stage: StageProgram) -> None:
    """Add a note to ``error`` of ``stage`` with the ranges of the integer ``inputs`` of its microbatch."""
    ranges = dict(_ranges(inputs))
    if not ranges:
        return
    listed = ", ".join(f"{name} from {low} to {high}" for name, (low, high) in ranges.items())
    error.add_note(f"integer inputs of this microbatch: {listed}")
    for name, place, rows in _looked_up(stage):
        low, high = ranges.get(name, (0, 0))
        if low < 0 or high >= rows:
            error.add_note(f"{name} is an index of {place}, which has rows 0 to {rows - 1}")


def _ranges(inputs: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, int]]]:
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and value.dtype in _INTEGERS and value.numel():
            yield name, (int(value.min()), int(value.max()))


def _looked_up(stage: StageProgram) -> Iterator[tuple[str, str, int]]:
    """The input, the name and the rows of each embedding that looks up an input as it is."""
    graph = stage.module.graph
    # The inputs are the first arguments of a stage.
    names = dict(zip(graph.find_nodes(op="placeholder"), stage.plan.inputs, strict=False))
    for node in graph.find_nodes(op="call_module"):
        module = stage.module.get_submodule(str(node.target))
        given = next(iter(node.all_input_nodes), None)
        if isinstance(module, nn.Embedding) and given in names:
            yield names[given], str(node.target), module.num_embeddings

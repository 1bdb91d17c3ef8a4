"""Partition: even cuts, and those of a function of the traced graph."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from nxdpp.pipeline.partition.partition import (
    Partition,
    PartitionPolicy,
    even_cuts,
    make_partition,
    stages_of_layers,
)
from nxdpp.tracing.graph.trace import TracedGraph
from nxdpp.tracing.modules.layers import layer_names
from tests.support.traced_models import PlainLayer, PlainModel, options_for, trace_with

X = {"x": torch.ones(3, 4)}


def _partition(stages: int, policy: PartitionPolicy | None = None) -> Partition:
    model = PlainModel()
    options = options_for(model, PlainLayer)
    return make_partition(
        trace_with(model, X, options), model, layer_names(model, options.layer_classes), stages, policy
    )


def test_a_function_of_the_traced_graph() -> None:
    seen: list[Any] = []

    def after_the_first(traced: TracedGraph, stages: int) -> Sequence[str]:
        seen.append((traced.inputs, stages))
        return traced.layers[: stages - 1]

    partition = _partition(3, after_the_first)

    assert seen == [(("x",), 3)]
    assert partition.cuts == ["layers.0", "layers.1"]


def test_invalid_results_of_a_function() -> None:
    with pytest.raises(ValueError, match=r"partition=.*<lambda> names \['layers\.9'\]"):
        _partition(2, lambda traced, stages: ["layers.9"])
    with pytest.raises(TypeError, match=r"partition=.*<lambda> gave 'layers\.0'"):
        _partition(2, lambda traced, stages: "layers.0")


def _layers(count: int) -> list[str]:
    return [f"model.layers.{index}" for index in range(count)]


def test_even_stages_differ_by_one_layer_at_most_and_later_ones_have_the_remainder() -> None:
    assert even_cuts(_layers(10), 4) == [f"model.layers.{cut}" for cut in (1, 3, 6)]
    for stages in range(1, 9):
        for layers in range(stages, 30):
            names = _layers(layers)
            layer_stages = stages_of_layers(even_cuts(names, stages), names)
            sizes = [list(layer_stages.values()).count(stage) for stage in range(stages)]
            assert sum(sizes) == layers
            assert sizes == sorted(sizes)
            assert sizes[-1] - sizes[0] <= 1

"""Partition: one object for the stage of each layer, node and parameter, made in one place."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from nxdpp.pipeline.partition.partition import GivenCuts, Partition, PartitionPolicy, make_partition
from nxdpp.tracing.graph.trace import TracedGraph
from nxdpp.tracing.modules.layers import layer_names
from tests.support.traced_models import PlainLayer, PlainModel, make_inputs, make_model, options_for, trace_with

X = {"x": torch.ones(3, 4)}


def _partition(stages: int, policy: PartitionPolicy | None = None) -> Partition:
    model = PlainModel()
    options = options_for(model, PlainLayer)
    return make_partition(
        trace_with(model, X, options), model, layer_names(model, options.layer_classes), stages, policy
    )


def test_even_stages_by_default() -> None:
    partition = _partition(2)

    assert partition.stages == 2
    assert partition.layers == [f"layers.{index}" for index in range(4)]
    assert partition.cuts == ["layers.1"]
    assert partition.layer_stages == {"layers.0": 0, "layers.1": 0, "layers.2": 1, "layers.3": 1}
    assert partition.layers_of([1]) == ["layers.2", "layers.3"]
    assert partition.parameters_of(0) == [
        "embedding.weight", "embedding.bias",
        *(f"layers.{index}.linear.{name}" for index in range(2) for name in ("weight", "bias")),
    ]  # fmt: skip


def test_given_cuts_in_any_order() -> None:
    assert _partition(3, GivenCuts(["layers.2", "layers.0"])).cuts == ["layers.0", "layers.2"]


def test_a_function_of_the_traced_graph() -> None:
    seen: list[Any] = []

    def after_the_first(traced: TracedGraph, stages: int) -> Sequence[str]:
        seen.append((traced.inputs, stages))
        return traced.layers[: stages - 1]

    partition = _partition(3, after_the_first)

    assert seen == [(("x",), 3)]
    assert partition.cuts == ["layers.0", "layers.1"]


@pytest.mark.parametrize(
    ("cuts", "error", "message"),
    [
        (["layers.9"], ValueError, r"partition=.*<lambda> names \['layers\.9'\]"),
        ([], ValueError, r"partition=.*<lambda> has 0 names, but 2 stages need 1"),
        ("layers.0", TypeError, r"partition=.*<lambda> gave 'layers\.0'"),
        (None, TypeError, r"partition=.*<lambda> gave None"),
    ],
)
def test_invalid_results_of_a_function(cuts: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        _partition(2, lambda traced, stages: cuts)


def test_a_cut_after_the_last_layer_leaves_the_head_alone() -> None:
    partition = _partition(2, GivenCuts(["layers.3"]))

    assert partition.layers_of([1]) == []
    assert partition.parameters_of(1) == ["head.weight", "head.bias"]


def test_owners_by_rank() -> None:
    model = make_model("tied_llama")
    options = options_for(model)
    traced = trace_with(model, make_inputs("llama"), options)
    partition = make_partition(traced, model, layer_names(model, options.layer_classes), 4)

    owners = partition.owners_by_rank(lambda stage: stage % 2)

    assert partition.owners["model.embed_tokens.weight"] == {0}
    assert partition.owners["lm_head.weight"] == {3}
    assert owners["model.embed_tokens.weight"] == {0}
    assert owners["lm_head.weight"] == {1}


def test_other_graphs_of_the_model_are_assigned_by_owners() -> None:
    partition = _partition(2)
    traced = trace_with(partition.module, {"x": torch.ones(1, 4)}, options_for(partition.module, PlainLayer))

    stages = {str(node.target): stage for node, stage in partition.assign(traced).items() if node.op == "call_module"}

    assert stages == {"embedding": 0, "layers.0": 0, "layers.1": 0, "layers.2": 1, "layers.3": 1, "head": 1}

"""Partition: even cuts, those of a function of the traced graph, unused parameters, and memory of communicators."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from nxdpp.pipeline.partition.balanced_partition import COMMUNICATOR_BYTES, MESSAGES_HELD, CostPolicy, transport_bytes
from nxdpp.pipeline.partition.partition import (
    Partition,
    PartitionPolicy,
    even_cuts,
    make_partition,
    stages_of_layers,
)
from nxdpp.schedules.chosen import ChosenSchedule
from nxdpp.tracing.costs.count import count_costs
from nxdpp.tracing.graph.trace import TracedGraph, TracingOptions, trace_for
from nxdpp.tracing.modules.layers import layer_names
from tests.support.in_process import InProcessPipeline
from tests.support.plain_models import WIDTH, Block, Skips
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


class LateTower(PlainModel):
    """A model that uses ``tower`` and ``shift`` before its layers, for some inputs, and registers them after these."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(4, 4)
        self.shift = nn.Parameter(torch.ones(4))
        self.pooler = nn.Linear(4, 4)

    def encode(self, image: torch.Tensor) -> torch.Tensor:
        encoded: torch.Tensor = self.tower(image) + self.shift
        return encoded

    def forward(self, x: torch.Tensor, image: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.embedding(x)
        if image is not None:
            hidden = hidden + self.encode(image)
        for layer in self.layers:
            hidden = layer(hidden)
        result: torch.Tensor = self.head(hidden if image is None else self.pooler(hidden)).mean()
        return result


def test_an_unused_part_before_the_layers_is_on_their_stage() -> None:
    model = LateTower()
    whole = copy.deepcopy(model)
    pipeline = InProcessPipeline(model, 2, X, options_for(model, PlainLayer))
    owners = pipeline.partition.owners

    assert owners["tower.weight"] == owners["shift"] == {0}
    assert owners["pooler.weight"] == {1}
    batch = {**X, "image": torch.randn(3, 4)}
    loss = whole(**batch)
    loss.backward()
    assert torch.equal(pipeline.train(batch, 1)[0], loss)
    for name, parameter in whole.named_parameters():
        assert torch.equal(model.get_parameter(name).grad, parameter.grad), name  # type: ignore[arg-type]


CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_communicators_and_messages_count_on_cuda_alone() -> None:
    model, batch = Skips(), {"x": torch.zeros(2, WIDTH)}
    traced = trace_for(model, batch, TracingOptions((Block,)))
    costs = count_costs(traced, model, batch, CPU)
    assert transport_bytes(traced, costs, CPU, 4, 2) == 0
    message = 2 * WIDTH * 4
    assert transport_bytes(traced, costs, CUDA, 4, 2) == 8 * COMMUNICATOR_BYTES + MESSAGES_HELD * message

    def cuts(limit: int, device: torch.device) -> list[str]:
        return CostPolicy(model, batch, "balanced", ChosenSchedule("1f1b", 2, 2, 1), limit).cuts(traced, costs, device)

    limit = 3 * COMMUNICATOR_BYTES
    assert len(cuts(limit, CPU)) == 1
    with pytest.raises(ValueError, match=r"limit of 0\.293 GiB per rank: .* on rank \d, 0\.293 GiB for communicators"):
        cuts(limit, CUDA)
    # The remedy: a higher limit.
    assert cuts(limit + 2**20, CUDA) == cuts(limit, CPU)

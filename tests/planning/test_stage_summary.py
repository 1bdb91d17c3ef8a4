"""Summaries of stages: sums equal to the whole model, and memory limits."""

import pytest
import torch

from nxdpp.planning.stage_summary import StageSummary, summarise_stages
from nxdpp.schedules.chosen import ChosenSchedule
from tests.support.models import make


def _plan(name: str, stages: int = 2, microbatches: int = 4, **changes: object) -> list[StageSummary]:
    arguments = {key: changes.pop(key) for key in ("balanced", "memory_limit", "chunks") if key in changes}
    with torch.device("meta"):
        model = make(name, **changes)
    ids = torch.empty(2, 16, dtype=torch.int64, device="meta")
    schedule = ChosenSchedule(None, stages, microbatches, arguments.pop("chunks", 1))  # type: ignore[arg-type]
    return summarise_stages(model, {"input_ids": ids, "labels": ids}, schedule, **arguments)  # type: ignore[arg-type]


def test_sum_over_stages_equals_the_model() -> None:
    model = make("llama")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    stages = _plan("llama", 3)

    assert [stage.layers for stage in stages] == [
        ["model.layers.0"],
        ["model.layers.1"],
        ["model.layers.2", "model.layers.3"],
    ]
    assert sum(stage.state.parameters for stage in stages) == parameters
    for stage in stages:
        state = stage.state
        assert state.weights == state.gradients == 4 * state.parameters
        assert state.optimizer == 2 * state.weights
        assert state.total == 16 * state.parameters
    (whole,) = _plan("llama", 1)
    assert sum(stage.forward for stage in stages) == whole.forward
    assert sum(stage.backward for stage in stages) == whole.backward


def test_one_hidden_state_is_sent() -> None:
    stages = _plan("llama", 4)

    assert [stage.sent_tensors for stage in stages] == [1, 1, 1, 0]
    assert [stage.sent_bytes for stage in stages] == [2 * 16 * 32 * 4] * 3 + [0]


def test_peak_activations_are_of_the_microbatches_in_flight() -> None:
    many, few = _plan("llama", 4, 8), _plan("llama", 4, 2)

    assert many[1].peak_activations == 3 * many[2].peak_activations // 2
    assert [a.peak_activations / b.peak_activations for a, b in zip(many, few, strict=True)] == [2, 1.5, 1, 1]


def test_tied_weight_counts_on_each_stage() -> None:
    stages, whole = _plan("tied_llama", 2), _plan("tied_llama", 1)

    assert sum(stage.state.parameters for stage in stages) == whole[0].state.parameters + 61 * 32


def test_balanced_moves_layers_away_from_a_heavy_head() -> None:
    even, balanced = (_plan("llama", 2, vocab_size=700, balanced=by_cost) for by_cost in (False, True))

    assert [len(stage.layers) for stage in even] == [2, 2]
    assert [len(stage.layers) for stage in balanced] == [3, 1]
    assert max(stage.work for stage in balanced) < max(stage.work for stage in even)


def test_very_heavy_head_is_a_stage_without_layers() -> None:
    layers, head = _plan("llama", 2, vocab_size=2000, balanced=True)

    assert (len(layers.layers), len(head.layers)) == (4, 0)
    assert head.state.parameters == 2000 * 32 + 32
    # FLOPs are the matrix products of the head for 32 tokens. Other operations on the logits add work.
    assert head.forward == 2 * 32 * 32 * 2000
    assert head.work > head.forward + head.backward


def test_memory_limit_moves_the_cut() -> None:
    unlimited = _plan("llama", 2, layers=8, balanced=True)
    used = [stage.state.total + stage.peak_activations for stage in unlimited]
    limit = int(0.97 * max(used))
    limited = _plan("llama", 2, layers=8, balanced=True, memory_limit=limit)

    assert [len(stage.layers) for stage in limited] != [len(stage.layers) for stage in unlimited]
    assert all(stage.state.total + stage.peak_activations <= limit for stage in limited)
    with pytest.raises(ValueError, match="no cut over 2 stages fits"):
        _plan("llama", 2, layers=8, balanced=True, memory_limit=limit // 3)


def test_chunks_even_out_a_heavy_head() -> None:
    one, two = (_plan("llama", 2, layers=8, vocab_size=700, balanced=True, chunks=n) for n in (1, 2))
    ranks = [sum(stage.work for stage in two[rank::2]) for rank in range(2)]

    assert (len(one), len(two)) == (2, 4)
    assert max(ranks) <= max(stage.work for stage in one)
    assert sum(len(stage.layers) for stage in two) == 8
    # Of four microbatches stage 1 and stage 2 have at most three and two in flight.
    (even,) = [_plan("llama", 2, chunks=2)]
    assert [stage.peak_activations / even[1].peak_activations for stage in even[1:3]] == [1, pytest.approx(2 / 3)]


def test_invalid_arguments() -> None:
    with pytest.raises(ValueError, match="--partition balanced"):
        _plan("llama", memory_limit=10)
    with pytest.raises(ValueError, match="cannot be split over 5"):
        _plan("llama", 5)

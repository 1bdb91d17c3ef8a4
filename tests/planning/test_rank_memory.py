"""Weights and gradients that come and go in a step, with ZeRO-2 and 3, against sums by hand."""

from dataclasses import replace

import pytest

from nxdpp.planning.layout import Layout
from nxdpp.planning.rank_memory import RankMemory, StageBytes, activation_peak, rank_memory, stage_bytes
from nxdpp.planning.stage_costs import Itemsizes, RankState, StageCosts
from nxdpp.schedules.actions import Action, ActionKind
from nxdpp.schedules.families.registry import find_family

HALF, WITH_FLOAT32_GRADIENTS = Itemsizes(2, 2), Itemsizes(2, 4)
# 100 half parameters: a gradient of 2 bytes, and 12 bytes of float32 state.
STATE = RankState(100, 200, 200, 400, 1200, largest=40, unit=50, rest=20)


def _layout(zero: int, data: int = 4) -> Layout:
    return Layout(data=data, zero=zero)


def _memory(zero: int, kind: str, sizes: Itemsizes = HALF) -> RankMemory:
    return rank_memory(_layout(zero), STATE, 0.0, kind, sizes, 0.0)


def test_shards_are_of_float32() -> None:
    """All layouts have 12 bytes of float32 state a parameter; shards need no half copy besides."""
    for zero in (2, 3):
        memory = _memory(zero, "cpu")
        assert (memory.weights, memory.gradients, memory.optimizer) == (400 / 4, 400 / 4, 800 / 4)
    assert (_memory(1, "cpu").weights, _memory(1, "cpu").optimizer) == (200, 1200 / 4)
    assert _memory(1, "cpu", WITH_FLOAT32_GRADIENTS).gradients == 400


def test_gathered_weights_and_whole_gradients() -> None:
    assert stage_bytes(_layout(0), STATE, HALF, False) == StageBytes(200)
    assert stage_bytes(_layout(2), STATE, HALF, False) == StageBytes(100, 200, 200, last=50)
    # A half gradient is made before it is added to the float32 one, in the last backward all of a unit.
    mixed = stage_bytes(_layout(2), STATE, WITH_FLOAT32_GRADIENTS, False)
    assert mixed == StageBytes(100, 200, 400, backward=40, weight=40, last=100 + 10)
    # The rest and two layers, gradients of the rest and a layer, and a message with gradients of one.
    each = stage_bytes(_layout(3), STATE, HALF, False)
    assert each == StageBytes(100, forward=120, backward=120 + 70 + 50, weight=200 + 50, reduces_each=True)
    # gloo reduces a copy, while the next layer is recomputed.
    again = stage_bytes(replace(_layout(3), checkpoint=True), STATE, HALF, False)
    assert again == replace(each, backward=each.backward + 50)


def test_the_stream_of_reductions_keeps_its_memory() -> None:
    """The memory of sharded gradients is there before they are. Gathers are in the stream of the computation."""
    for zero, gathered in ((2, 200.0), (3, 0.0)):
        assert _memory(zero, "cuda").buckets == 0
        part = stage_bytes(_layout(zero), STATE, HALF, True)
        assert (part.gradients, part.gathered) == (0, gathered)


def _costs(stages: int) -> list[StageCosts]:
    """Each stage holds 10 bytes of a microbatch, and adds 3 in its backward."""
    return [StageCosts(s, s + 1, 0, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0, 3, 0) for s in range(stages)]


@pytest.mark.parametrize(
    ("schedule", "chunks", "peak"),
    [
        # The last backward: its microbatch, whole weights and gradients, and a message.
        ("1f1b", 1, 10 + 200 + 200 + 3 + 50),
        # The last backward of the second stage. It is reduced before the first one has gradients: 3 microbatches,
        # weights of both stages, and gradients of one.
        ("interleaved", 2, 3 * 10 + 2 * 200 + 200 + 3 + 50),
    ],
)
def test_whole_gradients_last_from_the_first_to_the_last_backward_of_a_stage(
    schedule: str, chunks: int, peak: float
) -> None:
    family = find_family(schedule)
    actions = family.build(2, 2, chunks)[0]
    part = stage_bytes(_layout(2), STATE, HALF, True)
    stages = family.placement(2, chunks).stages_of(0)

    found = activation_peak(actions, _costs(2 * chunks), dict.fromkeys(stages, part))

    assert found == peak


def test_a_single_microbatch_has_no_whole_gradients_of_a_stage() -> None:
    """Its first backward is the last: units are reduced one after the other."""
    part = stage_bytes(_layout(2), STATE, HALF, True)

    found = activation_peak(find_family("1f1b").build(1, 1, 1)[0], _costs(1), {0: part})

    assert found == 200 + 10 + 3 + 50


def test_units_are_gathered_while_an_action_runs() -> None:
    part = stage_bytes(_layout(3), STATE, HALF, True)

    found = activation_peak(find_family("1f1b").build(2, 4, 1)[0], _costs(2), {0: part})

    assert found == 2 * 10 + 3 + (20 + 2 * 50) + (20 + 50) + 50


def test_a_split_backward_keeps_whole_gradients_to_the_weight_gradient() -> None:
    """Recomputed layers have theirs from the input-gradient on, and a weight-gradient gathers all of its stage."""
    part = stage_bytes(_layout(3), STATE, HALF, True)
    # 10 bytes of a microbatch to its input-gradient, then 4; gradients of 150 bytes come in it, and of 50 later.
    costs = [replace(each, kept=4, at_once=150, deferred=50) for each in _costs(2)]
    kinds = (ActionKind.FORWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)
    forward, inputs, weights = (Action(1, kind, 0) for kind in kinds)

    # In the weight-gradient: all weights, a message, whole gradients.
    assert activation_peak([forward, inputs, weights], costs, {1: part}) == 150 + 50 + 250
    # Another input-gradient makes them once more, and they wait in one place.
    second = [Action(1, kind, 1) for kind in kinds]
    both = [forward, inputs, second[0], second[1], weights, second[2]]
    assert activation_peak(both, costs, {1: part}) == 150 + 4 + 50 + 250
    # All of the first stage's backward is in its weight-gradient.
    first = [Action(0, kind, 0) for kind in kinds]
    assert activation_peak(first, costs, {0: part}) == 10 + 3 + 150 + 50 + 250


def test_each_microbatch_keeps_the_weights_that_autocast_converts() -> None:
    """Without a cache of autocast, from its forward to its backward; recomputed layers convert them again."""
    state = replace(STATE, cast=80)
    kept = stage_bytes(_layout(3), state, Itemsizes(4, 4), True)
    again = stage_bytes(replace(_layout(3), checkpoint=True), state, Itemsizes(4, 4), True)

    assert (kept.held, again.held) == (80, 8)
    found = activation_peak(find_family("1f1b").build(2, 4, 1)[0], _costs(2), {0: kept})
    assert found == 2 * (10 + 80) + 3 + kept.backward

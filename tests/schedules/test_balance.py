"""Balanced cuts compared with all possible cuts."""

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxdpp.schedules.balance import LayerCost, MemoryLimit, balanced_cuts
from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.simulate import in_flight


def _layers(work: Sequence[float], state: Sequence[int] = (), activations: Sequence[int] = ()) -> list[LayerCost]:
    state, activations = state or [0] * len(work), activations or [0] * len(work)
    return [LayerCost(f"layers.{i}", *cost) for i, cost in enumerate(zip(work, state, activations, strict=True))]


def _measure(
    costs: Sequence[LayerCost],
    ends: Sequence[int],
    ranks: int,
    memory: MemoryLimit | None,
    rank_of: Sequence[int] | None = None,
) -> tuple[float, float] | None:
    """Return the work of the slowest rank and the sum of squares. Return None if a rank exceeds the memory."""
    work = [0.0] * ranks
    bytes_ = [0] * ranks
    for stage, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        rank = rank_of[stage] if rank_of else stage % ranks
        in_flight = memory.in_flight[stage] if memory else 0
        bytes_[rank] += in_flight * memory.shared_bytes if memory else 0
        for cost in costs[start:end]:
            work[rank] += cost.work
            bytes_[rank] += cost.state_bytes + in_flight * cost.activation_bytes
    if memory and max(bytes_) > memory.bytes:
        return None
    return max(work), sum(value * value for value in work)


def _best(
    costs: Sequence[LayerCost], ranks: int, chunks: int, memory: MemoryLimit | None, rank_of: Sequence[int] | None
) -> tuple[float, float] | None:
    all_cuts = combinations(range(1, len(costs)), ranks * chunks - 1)
    measured = (_measure(costs, [*cuts, len(costs)], ranks, memory, rank_of) for cuts in all_cuts)
    return min((m for m in measured if m is not None), default=None)


def _ends(costs: Sequence[LayerCost], cuts: Sequence[str]) -> list[int]:
    names = [cost.layer for cost in costs]
    return [*(names.index(cut) + 1 for cut in cuts), len(costs)]


def _check(
    costs: Sequence[LayerCost],
    ranks: int,
    chunks: int,
    memory: MemoryLimit | None,
    rank_of: Sequence[int] | None = None,
) -> None:
    best = _best(costs, ranks, chunks, memory, rank_of)
    if best is None:
        with pytest.raises(ValueError, match="GiB"):
            balanced_cuts(costs, ranks, chunks, memory, rank_of)
        return
    ends = _ends(costs, balanced_cuts(costs, ranks, chunks, memory, rank_of))
    assert ends == sorted(set(ends))
    assert len(ends) == ranks * chunks
    assert _measure(costs, ends, ranks, memory, rank_of) == best


SIZES = st.integers(0, 9)


@given(st.lists(st.tuples(SIZES, SIZES, SIZES), min_size=1, max_size=9), st.data())
@settings(max_examples=80, deadline=None)
def test_the_cut_is_optimal(layers: list[tuple[int, int, int]], data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, min(len(layers), 5)))
    limit = data.draw(st.none() | st.integers(0, 120))
    peaks = in_flight(FAMILIES["1f1b"].build(ranks, 4))
    memory = None if limit is None else MemoryLimit(limit, peaks, data.draw(st.integers(0, 3)))

    _check(_layers(*map(list, zip(*layers, strict=True))), ranks, 1, memory)


@given(st.lists(st.tuples(SIZES, SIZES, SIZES), min_size=4, max_size=9), st.data())
@settings(max_examples=60, deadline=None)
def test_the_cut_into_chunks_is_optimal(layers: list[tuple[int, int, int]], data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, min(3, len(layers) // 2)))
    chunks = data.draw(st.integers(2, len(layers) // ranks))
    limit = data.draw(st.none() | st.integers(0, 150))
    memory = (
        None
        if limit is None
        else MemoryLimit(
            limit,
            data.draw(st.lists(SIZES, min_size=ranks * chunks, max_size=ranks * chunks)),
            data.draw(st.integers(0, 3)),
        )
    )

    _check(_layers(*map(list, zip(*layers, strict=True))), ranks, chunks, memory)


def test_error_of_a_memory_limit_has_numbers() -> None:
    gib = 2**30
    costs = _layers([1] * 4, state=[2 * gib] * 4, activations=[gib] * 4)

    with pytest.raises(ValueError, match=r"no cut over 2 .* limit of 7 GiB") as caught:
        balanced_cuts(costs, 2, memory=MemoryLimit(7 * gib, [2, 1]))

    assert "needs 8 GiB on rank 0" in str(caught.value)
    assert "2 microbatches in flight" in str(caught.value)
    assert "more pipeline stages" in str(caught.value)


def test_fewer_layers_than_stages() -> None:
    with pytest.raises(ValueError, match="3 transformer layers cannot be split over 4 pipeline stages"):
        balanced_cuts(_layers([1, 1, 1]), 2, 2)


def test_search_of_large_models_ends() -> None:
    """Search time of large models. The number of possible cuts is exponential in the number of stages."""
    layers, ranks, chunks = 80, 8, 2
    work = [11.0, *[10.0] * (layers - 2), 25.0]
    costs = _layers(work)

    ends = _ends(costs, balanced_cuts(costs, ranks, chunks))

    measured = _measure(costs, ends, ranks, None)
    assert measured is not None
    assert measured[0] <= sum(work) / ranks + 10

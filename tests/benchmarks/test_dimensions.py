"""Bytes and memory of each dimension against formulas, exactly, for a tiny Llama; and the tables of the benchmark."""

import pytest
import torch
import torch.distributed as dist

from benchmarks import dimensions
from benchmarks.layouts.contenders import PAIRS, Timed, time_rank
from benchmarks.layouts.job import Layout, Shape, least_bytes, plan
from benchmarks.layouts.step import Measured, measure_rank
from benchmarks.layouts.traffic import Traffic
from tests.support.run_ranks import run_ranks

pytestmark = pytest.mark.one_python

TINY = Shape(hidden=32, middle=48, layers=2, heads=4, vocabulary=64, batch=1, length=8, microbatches=2)
LAYOUTS = [Layout(2, 1, 1), Layout(1, 2, 1), Layout(1, 1, 2), Layout(1, 1, 2, True)]


def _measure(rank: int) -> tuple[list[Measured], list[list[Timed]], float]:
    """Measure all layouts of two ranks, one after the other."""
    measured = [measure_rank(rank, layout, TINY) for layout in LAYOUTS]
    return measured, [time_rank(rank, pair, TINY, 1) for pair in PAIRS], _counted(rank)


def _counted(rank: int) -> float:
    """Bytes of an all-reduce of 64 numbers, and of a gather of 32, as the dispatch mode counts them."""
    dist.init_process_group("gloo")
    with Traffic({}) as traffic:
        dist.all_reduce(torch.ones(64))
        dist.all_gather([torch.empty(32) for _ in range(2)], torch.ones(32))
        dist.all_reduce(torch.ones(1, dtype=torch.int64))
    assert traffic.control == 8
    dist.destroy_process_group()
    return float(sum(traffic.sent.values()))


@pytest.fixture(scope="module")
def ranks() -> list[tuple[list[Measured], list[list[Timed]], float]]:
    return run_ranks(2, _measure, timeout=120.0)


def test_the_counter_counts_what_a_ring_sends(ranks: list[tuple[list[Measured], list[list[Timed]], float]]) -> None:
    assert [sent for _, _, sent in ranks] == [64 * 4 + 32 * 4] * 2


def test_bytes_and_memory_equal_the_formulas(ranks: list[tuple[list[Measured], list[list[Timed]], float]]) -> None:
    for number, layout in enumerate(LAYOUTS):
        planned = plan(layout, TINY)
        for measured, _, _ in ranks:
            of_rank = measured[number]
            summary = planned[of_rank.stage]
            least = least_bytes(layout, TINY, summary, of_rank.stage)
            assert of_rank.sent["pipeline"] == least["pipeline"]
            assert of_rank.sent["data"] == least["data"]
            assert of_rank.sent["tensor"] == summary.traffic.tensor >= least["tensor"]
            assert of_rank.sent["other"] == 0
            state = summary.state
            assert (of_rank.parameters, of_rank.gradients) == (state.weights, state.gradients)
            assert of_rank.optimizer == state.optimizer


def test_a_tensor_group_sums_three_gradients_of_inputs_more_than_the_least(
    ranks: list[tuple[list[Measured], list[list[Timed]], float]],
) -> None:
    """Of query, key and value one sum would do, and of gate and up."""
    (summary,) = plan(LAYOUTS[0], TINY)
    states = TINY.batch * TINY.length * TINY.hidden * 4
    more = TINY.microbatches * TINY.layers * 3 * states

    assert ranks[0][0][0].sent["tensor"] == least_bytes(LAYOUTS[0], TINY, summary, 0)["tensor"] + more


def test_torch_does_the_same_work(ranks: list[tuple[list[Measured], list[list[Timed]], float]]) -> None:
    for _, timed, _ in ranks:
        for ours, theirs in timed:
            assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
            assert min(ours.seconds, theirs.seconds, ours.sent, theirs.sent) > 0


def test_rows(monkeypatch: pytest.MonkeyPatch, ranks: list[tuple[list[Measured], list[list[Timed]], float]]) -> None:
    monkeypatch.setattr(dimensions, "run_ranks", lambda count, *_, timeout: [measured[3] for measured, _, _ in ranks])
    (row,) = dimensions.rows(LAYOUTS[3], TINY)
    assert row.count("|") == dimensions.HEADER.splitlines()[0].count("|")
    monkeypatch.setattr(dimensions, "run_ranks", lambda count, *_, timeout: [timed[0] for _, timed, _ in ranks])
    assert dimensions.row_of_times("data", TINY, 1).startswith("| data | DDP | ")

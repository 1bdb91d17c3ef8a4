"""Bytes and memory of each dimension against formulas, for a tiny Llama; and the tables of the benchmark."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from benchmarks import dimensions
from benchmarks.layouts import tables
from benchmarks.layouts.contenders import PAIRS, Timed, time_rank
from benchmarks.layouts.hidden import Case, Sleepers, Steps, summary, time_average
from benchmarks.layouts.job import Layout, Shape, least_bytes, plan
from benchmarks.layouts.step import Measured, measure_rank
from benchmarks.layouts.traffic import Traffic
from benchmarks.page import replace_block, write_blocks
from benchmarks.report import session_line
from tests.support.run_ranks import run_ranks

TINY = Shape(hidden=64, middle=128, layers=2, heads=4, vocabulary=64, batch=2, length=32, microbatches=2)
LAYOUTS = [
    Layout(2, 1, 1),
    Layout(2, 1, 1, sequence=True),
    Layout(1, 2, 1),
    Layout(1, 1, 2),
    Layout(1, 1, 2, zero1=True),
]
CASES = [Case("Llama", TINY), Case("sleeping layers", Sleepers(2, 64, 0.001))]
ROUNDS = 2


class Results(NamedTuple):
    """Those of one rank."""

    measured: list[Measured]
    timed: list[list[Timed]]
    averages: list[dict[str, Steps]]
    counted: float


def _measure(rank: int) -> Results:
    """Measure all jobs of two ranks, one after the other."""
    return Results(
        [measure_rank(rank, layout, TINY) for layout in LAYOUTS],
        [time_rank(rank, pair, TINY, ROUNDS) for pair in PAIRS],
        [time_average(rank, case, ROUNDS) for case in CASES],
        _counted(),
    )


def _counted() -> float:
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
def ranks() -> list[Results]:
    return run_ranks(2, _measure, timeout=300.0)


def test_the_counter_counts_what_a_ring_sends(ranks: list[Results]) -> None:
    assert [of_rank.counted for of_rank in ranks] == [64 * 4 + 32 * 4] * 2


@pytest.mark.parametrize("number", range(len(LAYOUTS)), ids=map(str, LAYOUTS))
def test_bytes_and_memory_equal_the_formulas(number: int, ranks: list[Results]) -> None:
    layout = LAYOUTS[number]
    planned = plan(layout, TINY)
    for measured in (of_rank.measured[number] for of_rank in ranks):
        memory = planned.memory[measured.stage]
        least = least_bytes(layout, TINY, planned, measured.stage)
        assert measured.sent["pipeline"] == least["pipeline"]
        assert measured.sent["data"] == least["data"]
        # Of two samples the plan has more than twice what one sends, as their work is; gradients of norms are left out.
        assert measured.sent["tensor"] == pytest.approx(planned.sent[measured.stage].tensor, rel=0.05)
        # Under sequence parallelism the layers gather their inputs again, which they do not keep.
        assert (measured.sent["tensor"] > least["tensor"]) == layout.sequence
        assert measured.sent["tensor"] >= least["tensor"]
        assert measured.sent["other"] == 0
        assert (measured.parameters, measured.gradients) == (memory.weights, memory.gradients)
        assert measured.optimizer == memory.optimizer
        # Formulas leave out what an operation or a message needs for a moment.
        assert 0.8 < (measured.peak - measured.gradients) / memory.activations < 1.5


def test_torch_does_the_same_work(ranks: list[Results]) -> None:
    for of_rank in ranks:
        for ours, theirs in of_rank.timed:
            assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
            assert len(ours.seconds) == len(theirs.seconds) == ROUNDS
            assert min(*ours.seconds, *theirs.seconds, ours.sent, theirs.sent) > 0


def test_each_contender_averages_all_gradients(ranks: list[Results]) -> None:
    (whole,) = plan(Layout(1, 1, 2), TINY).memory
    for of_rank in ranks:
        for case, contenders in zip(CASES, of_rank.averages, strict=True):
            assert list(contenders) == ["nxdpp", "DDP"]
            for steps in contenders.values():
                assert len(steps.overlapped) == len(steps.at_end) == len(steps.alone) == len(steps.cpu) == ROUNDS
                expected = whole.gradients if case is CASES[0] else 3 * 64 * 4
                assert steps.gradients == expected
            assert contenders["nxdpp"].early == 1.0


def test_the_hidden_share_is_of_the_slower_rank_in_each_round() -> None:
    first = Steps([1.0, 1.0], [1.2, 1.4], [0.4, 0.3], [0.1, 0.1], waited=[0.1, 0.1])
    second = Steps([1.1, 0.9], [1.3, 1.3], [0.2, 0.4], [0.3, 0.1], waited=[0.2, 0.0])

    result = summary([first, second])
    assert result.share == pytest.approx((0.625, 0.75, 0.875))
    assert (result.overlapped, result.alone) == pytest.approx((1.05, 0.4))
    assert (result.at_end, result.waited, result.cpu) == pytest.approx((1.35, 0.15, 0.375))


def test_rows_fit_their_tables(ranks: list[Results]) -> None:
    for number, layout in enumerate(LAYOUTS):
        found = tables.layout_rows(layout, TINY, [of_rank.measured[number] for of_rank in ranks])
        assert len(found) == layout.pipeline
        for sent, memory in found:
            assert (len(sent), len(memory)) == (len(tables.BYTES), len(tables.MEMORY))
    for number, pair in enumerate(PAIRS):
        row = tables.times_row(pair, [of_rank.timed[number] for of_rank in ranks])
        assert len(row) == len(tables.TIMES)
    for number, case in enumerate(CASES):
        rows = tables.average_rows(case, [of_rank.averages[number] for of_rank in ranks])
        assert [len(row) for row in rows] == [len(tables.AVERAGE)] * 2


def test_the_command_writes_tables_between_their_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n<!-- times -->\nold\n<!-- end of times -->\n\nProse.\n")
    monkeypatch.setattr(dimensions, "measure", lambda section, rounds: {section: f"| {section} of {rounds} |"})

    dimensions.main(["--only", "times", "--rounds", "3", "--write", str(page)])
    written = page.read_text()
    assert "old" not in written
    assert "| times of 3 |\n<!-- end of times -->\n\nProse.\n" in written
    assert f"{session_line().partition(',')[0]}, " in written
    with pytest.raises(ValueError, match="<!-- bytes -->"):
        write_blocks(page, {"times": "new", "bytes": "new"})
    assert page.read_text() == written


def test_the_page_has_a_place_for_each_table() -> None:
    text = (Path(__file__).parents[2] / "benchmarks" / "results" / "dimensions.md").read_text()
    for name in ("bytes", "memory", "average", "times"):
        assert replace_block(text, name, "new") != text

"""The comparison with torch.distributed.pipelining: what its layers, verdicts and tables say, and a small run."""

import json
import time
from functools import partial

import pytest
import torch
from rich.console import Console

from benchmarks.compare.alternation import Times
from benchmarks.compare.contender import BY_HAND, PEER, US
from benchmarks.compare.efficiency import case_rows, ideal_ms, sleeping_job
from benchmarks.compare.field import Entry, run_field
from benchmarks.compare.job import Job
from benchmarks.compare.layers import ScalingLayer, SleepingLayer
from benchmarks.compare.overhead import targets
from benchmarks.compare.rows import Row, Verdict
from benchmarks.compare.session import Effort, describe_session
from benchmarks.compare.stacks import stack_job
from benchmarks.compare.table import print_markdown, print_table, read_rows, rows_as_json
from nxdpp.parallel_layers import parallel_state
from tests.support.run_ranks import run_ranks


def test_a_sleeping_layer_sleeps_once_for_each_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    layer = SleepingLayer(0.005, 3)
    hidden = torch.rand(2, 3, requires_grad=True)
    output = layer(hidden).sum()
    assert slept == [0.005]
    torch.autograd.grad(output, hidden, retain_graph=True)
    assert slept == [0.005] * 2
    torch.autograd.grad(output, layer.weight, retain_graph=True)
    assert slept == [0.005] * 3
    output.backward()
    assert slept == [0.005] * 5


def test_the_ideal_of_1f1b_is_the_one_of_the_issue() -> None:
    assert ideal_ms("1f1b", 5, 32) == 525


def test_an_efficiency_row_compares_what_is_above_the_ideal() -> None:
    entries = [
        Entry(BY_HAND, "1f1b", Times([0.545, 0.545], [])),
        Entry(PEER, "1f1b", Times([0.565, 0.565], [])),
        Entry(US, "1f1b", Times([0.548, 0.548], [])),
    ]
    rows = case_rows("case", 5, 32, entries)
    assert [row.median for row in rows[:3]] == pytest.approx([20, 40, 23])
    peer, by_hand, ideal = rows[2].verdicts
    assert [verdict.ratio for verdict in (peer, by_hand, ideal)] == pytest.approx([23 / 40, 23 / 20, 548 / 525])
    assert [verdict.met for verdict in (peer, by_hand, ideal)] == [True, False, None]


def test_overhead_has_the_targets_of_the_issue() -> None:
    assert targets("1f1b") == {BY_HAND: 1.1, PEER: 1.0}
    assert targets("zb-v") == {PEER: 0.6}
    assert targets("gpipe") == {PEER: None}


def test_rows_survive_json_and_a_missed_target_is_shown() -> None:
    rows = [
        Row("efficiency", "5 ms", "1f1b", US, "ms", 50.0, 49.0, 51.0, 12, [Verdict(PEER, 0.7, 0.6)]),
    ]
    session = describe_session(Effort(1, 3))
    content = json.loads(rows_as_json(rows, session))
    assert content["rows"][0]["verdicts"][0]["met"] is False
    assert read_rows(content) == rows
    console = Console(width=150)
    with console.capture() as captured:
        print_table(console, rows, session)
    text = captured.get()
    assert "0 of 1 targets are met." in text
    assert "not met: efficiency, 5 ms, 1f1b: 0.7 x torch (at most 0.6: NOT met)" in text


def test_a_table_for_a_document_has_a_line_for_each_row(capsys: pytest.CaptureFixture[str]) -> None:
    row = Row("efficiency", "5 ms", "1f1b", US, "ms", 50.0, 49.0, 51.0, 12, [Verdict(PEER, 0.7, 0.6)])
    print_markdown([row], describe_session(Effort(1, 3)))
    assert "| 1f1b | nxdpp | 50 | 49 to 51 | ms | 0.7 x torch (at most 0.6: NOT met) |" in capsys.readouterr().out


def light_rank(rank: int) -> list[Entry]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)

    def job(chunks: int) -> Job:
        return stack_job(partial(ScalingLayer, 8), 2 * chunks, (2, 4, 8), 4)

    return run_field(["gpipe", "1f1b", "interleaved", "zb1p", "zb-v"], job, job, Effort(1, 2))


def test_all_contenders_compute_the_same_and_are_timed() -> None:
    entries = run_ranks(2, light_rank)[0]
    ran = [(entry.name, entry.family) for entry in entries]
    assert {(BY_HAND, "1f1b"), (PEER, "1f1b"), (US, "1f1b"), (PEER, "gpipe"), (PEER, "zb-v")} <= set(ran)
    for entry in entries:
        assert len(entry.times.wall) == len(entry.times.cpu) == 2
        assert min(entry.times.wall) > 0


def lying_rank(rank: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    other = partial(stack_job, partial(ScalingLayer, 8), 2, (2, 4, 8))
    run_field(["1f1b"], lambda chunks: other(4), lambda chunks: other(2), Effort(0, 1))


def test_a_contender_that_computes_something_else_is_caught() -> None:
    with pytest.raises(AssertionError, match=r"by hand 1f1b: .* differs by"):
        run_ranks(2, lying_rank)


def test_the_sleeping_job_has_the_same_gradients_without_sleep() -> None:
    asleep, awake = (sleeping_job(ms, 2, 1).reference() for ms in (1, 0))
    assert torch.equal(asleep[0], awake[0])
    assert all(torch.equal(asleep[1][name], awake[1][name]) for name in awake[1])

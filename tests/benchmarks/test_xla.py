"""The tables of steps on XLA ranks, from given steps; the command itself runs where torch_xla is installed."""

import re
from importlib.util import find_spec

import pytest

from benchmarks import xla
from benchmarks.in_turn.llama_steps import Copies, Rank, Size, Step
from benchmarks.in_turn.turns import Job, Turns, run_in_turn


def _rank(seconds: float, copies: int = 0) -> Rank:
    of_copies = Copies(copies, copies * 2048, copies * 40e-6)
    step = Step(seconds, 2 * seconds, 0.5, 0.25 * seconds, inwards=Copies(1, 2048, 0.05 * seconds))
    apart = Step(1.5 * seconds, seconds, 0.5, 0.0, of_copies, Copies(copies, copies * 2048, copies * 10e-6))
    return Rank([2.0, 1.0], [Step(9.0), Step(3.0)], 7, 10.5, [step] * 3, [apart] * 3)


def _results() -> dict[str, list[Rank]]:
    jobs = xla.jobs_of(Size(), (1, 2))
    seconds = {xla.PLAIN: 0.1, "XLA, 2 ranks": 0.3}
    return {
        name: [_rank(seconds.get(name, 0.2), (rank + 1) * (job.ranks - 1)) for rank in range(job.ranks)]
        for name, job in jobs.items()
    }


def test_the_tables() -> None:
    tables = xla.tables_of(_results(), (1, 2))
    rows = {name: [line.strip("| ").split() for line in table.splitlines()[2:]] for name, table in tables.items()}
    plain, *of_ranks = tables[xla.STEPS].splitlines()[2:]
    assert [cell.strip() for cell in plain.strip("|").split("|")] == [
        *[xla.PLAIN, "100", "200", "0.50", "7", "12.0", "10.5"],
    ]
    assert [line.split("|")[1].strip() for line in of_ranks] == [
        *["XLA, 1 rank", "XLA, 2 ranks", "CPU, 1 rank", "CPU, 2 ranks"]
    ]
    assert of_ranks[1].split("|")[2:5] == [" " * 7 + "300 ", " " * 11 + "1200 ", " " * 7 + "1.50 "]
    assert rows[xla.SHARES] == [[count, "|", "50%", "|", "25%", "|", "5%", "|", "70%"] for count in ("1", "2")]
    assert rows[xla.COPIES] == [
        ["1", "|", "0", "|", "none", "|", "none", "|", "none", "|", "200", "|", "300"],
        ["2", "|", "2", "|", "2", "|", "40", "|", "10", "|", "300", "|", "450"],
    ]


def _turn(rank: int, turns: Turns, failing: bool) -> list[int]:
    seen: list[int] = []

    def step(number: int) -> None:
        assert not (failing and number == 1), "a fault"
        seen.append(number)

    assert len(turns.run(step)) == len(seen)
    return seen


def test_jobs_take_turns_and_a_fault_of_one_ends_all() -> None:
    jobs = {"one": Job(1, _turn, (False,)), "two": Job(2, _turn, (False,))}
    assert run_in_turn(jobs, 3, 60.0) == {"one": [[0, 1, 2]], "two": [[0, 1, 2]] * 2}
    with pytest.raises(AssertionError, match="a fault"):
        run_in_turn(jobs | {"bad": Job(1, _turn, (True,))}, 3, 60.0)


@pytest.mark.skipif(find_spec("torch_xla") is None, reason="torch_xla is not installed")
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    xla.main(["--quick"])
    printed = capsys.readouterr().out
    assert re.search(r"\| one XLA process, without nxdpp +\| +\d+ \|", printed)
    assert re.search(r"\| XLA, 2 ranks +\| +\d+ \|", printed)
    (copies,) = re.findall(r"^\| +2 \| +(\d+) \| +\d+ \| +\d+ \| +\d+ \| +\d+ \| +\d+ \|$", printed, re.M)
    # A copy of each of the two microbatches.
    assert int(copies) >= 2

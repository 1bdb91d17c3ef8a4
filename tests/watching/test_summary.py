"""The run in one object: rows of ranks, faults and whom they name, the strip, and the balance of experts."""

import json
from pathlib import Path
from typing import Any

from nxdpp.watching.metrics_reader import RunMetrics
from nxdpp.watching.summary import summary_of
from tests.watching.runs import BEGAN, STARTED, begin, lines, step, whole_run

DIED = "rank 1 died without an error: killed by a signal or out of memory, crashed, or ended by os._exit"


def _summary(folder: Path) -> dict[str, Any]:
    summary = summary_of(RunMetrics(folder), BEGAN + 12)
    assert json.loads(json.dumps(summary, allow_nan=False))
    return summary


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    found = _summary(whole_run(tmp_path))
    assert {key: found[key] for key in ("step", "steps", "schedule", "state", "began_at", "seen_at")} == {
        "step": 20,
        "steps": 40,
        "schedule": "1f1b",
        "state": "running",
        "began_at": BEGAN,
        "seen_at": BEGAN + 10,
    }
    assert found["latest"] == {"loss": "0.2", "tokens a second": "1,024", "seconds": "0.5"}
    assert [row["busy"] for row in found["ranks"]] == [0.75, 0.5]
    assert [row["state"] for row in found["ranks"]] == ["running", "running"]
    assert (found["faults"], found["experts"]) == ([], None)
    assert (found["command"], found["versions"]) == tuple(STARTED.values())


def test_the_strip_is_the_last_step_that_all_ranks_have(tmp_path: Path) -> None:
    whole_run(tmp_path, 20)
    lines(tmp_path, 0, *[step(0, number) for number in range(21, 30)], step(0, 30, actions=[["0F0", 1.0, 1.0]]))
    strip = _summary(tmp_path)["strip"]
    assert (strip["step"], strip["ms"]) == (20, 400.0)
    placed = [[(label, start, end) for label, _, _, start, end in row] for row in strip["ranks"]]
    assert placed == [[("F0", 0.0, 100.0), ("B0", 300.0, 400.0)], [("F0", 100.0, 200.0), ("B0", 200.0, 300.0)]]
    assert {kind: name for kind, (name, _) in strip["kinds"].items()} == {"F": "forward", "B": "backward"}


def test_a_killed_rank_is_named_by_the_others(tmp_path: Path) -> None:
    lines(whole_run(tmp_path), 0, {"time": BEGAN + 11, "fault": f"stops because {DIED}"})
    found = _summary(tmp_path)
    assert found["state"] == "fault"
    assert found["faults"] == [{"text": DIED, "told_by": [0], "named": [1]}]
    assert [row["state"] for row in found["ranks"]] == ["fault", "died"]


def test_a_run_that_ended_well(tmp_path: Path) -> None:
    for rank in range(2):
        lines(whole_run(tmp_path) if rank == 0 else tmp_path, rank, {"time": BEGAN + 11, "ends": True})
    assert _summary(tmp_path)["state"] == "done"
    (tmp_path / "metrics" / "rank0001.jsonl").unlink()
    found = _summary(tmp_path)
    assert (found["state"], found["world"], len(found["ranks"])) == ("running", 2, 1)


def test_a_long_curve_is_thinned_and_ends_with_its_last_value(tmp_path: Path) -> None:
    lines(tmp_path, 0, begin(0, 1), *[step(0, number, norm=number) for number in range(1, 1001)])
    lines(tmp_path, 0, step(0, 1001, norm="inf"))
    found = _summary(tmp_path)
    norms = found["curves"]["norm"]
    assert len(norms) == 501
    assert norms[:2] == [(1, 1.0), (3, 2.5)]
    assert norms[-1] == (1001, None)
    assert found["latest"]["norm"] == "inf"

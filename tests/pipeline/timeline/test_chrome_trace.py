"""The file: whole after each step, events of all ranks, arrows, and paths that are refused."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from nxdpp.pipeline.timeline.chrome_trace import ChromeTrace, check_path, path_of_pipeline
from nxdpp.pipeline.timeline.recorder import Event, What

STEP = Event(What.STEP, "", 0, None, None, 0, 90_000)
SENDER = [STEP, Event(What.COMPUTE, "F", 0, 0, None, 0, 5_000), Event(What.SEND, "F", 0, 0, 1, 5_000, 6_000)]
RECEIVER = [STEP, Event(What.WAIT, "F", 1, 0, 0, 2_000, 9_500), Event(What.COMPUTE, "F", 1, 0, None, 9_500, 20_000)]


def load(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())
    return found


def test_the_file_is_whole_after_each_step(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = ChromeTrace(path, pipeline=3, ranks=2)
    trace.create()
    assert {event["args"]["name"] for event in load(path) if event["name"] == "thread_name"} == {"rank 0", "rank 1"}
    for step in range(2):
        trace.append(step, "train", {0: SENDER, 1: RECEIVER})
        slices = [event for event in load(path) if event["ph"] == "X"]
        assert len(slices) == 6 * (step + 1)
    assert all(event["pid"] == 3 for event in load(path))
    assert slices[1] == {
        "ph": "X", "name": "F s0 mb0", "cat": "compute", "pid": 3, "tid": 0, "ts": 0.0, "dur": 5.0,
        "args": {"step": 0, "kind": "F", "stage": 0, "microbatch": 0},
    }  # fmt: skip
    trace.create()
    assert all(event["ph"] == "M" for event in load(path))


def test_an_arrow_goes_from_the_send_into_the_wait(tmp_path: Path) -> None:
    trace = ChromeTrace(tmp_path / "trace.json", pipeline=0, ranks=2)
    trace.create()
    trace.append(0, "train", {0: SENDER, 1: RECEIVER})
    trace.append(1, "train", {0: SENDER, 1: RECEIVER})
    trace.append(2, "train, cut short", {1: RECEIVER})
    arrows = [event for event in load(tmp_path / "trace.json") if event["ph"] in "sf"]
    assert [(arrow["ph"], arrow["tid"], arrow["ts"], arrow["id"]) for arrow in arrows] == [
        ("s", 0, 5.0, 0), ("f", 1, 9.499, 0), ("s", 0, 5.0, 1), ("f", 1, 9.499, 1),
    ]  # fmt: skip


def test_replicas_write_beside_the_first() -> None:
    assert path_of_pipeline(Path("a/trace.json"), 0) == Path("a/trace.json")
    assert path_of_pipeline(Path("a/trace.json"), 2) == Path("a/trace.pipeline2.json")


def test_paths_that_cannot_be_written_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="there is no folder"):
        check_path(tmp_path / "none" / "trace.json")
    with pytest.raises(ValueError, match="is a folder"):
        check_path(tmp_path)
    with pytest.raises(ValueError, match="is a folder"):
        check_path("")
    with pytest.raises(TypeError, match="must be the path of a file"):
        check_path(True)
    assert check_path(str(tmp_path / "trace.json")) == tmp_path / "trace.json"
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ValueError, match="no permission"):
        check_path(tmp_path / "trace.json")


def test_a_file_that_cannot_be_begun_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be written: No such file"):
        ChromeTrace(tmp_path / "none" / "trace.json", 0, 1).create()

"""Timeline files: complete after each step, with the events of all ranks and arrows; refused paths."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from nxdpp.schedules.timeline_file import Activity, Event, TimelineWriter, check_path

STEP = Event(Activity.STEP, "", 0, None, None, 0, 90_000)
SENDER = [STEP, Event(Activity.COMPUTE, "F", 0, 0, None, 0, 5_000), Event(Activity.SEND, "F", 0, 0, 1, 5_000, 6_000)]
RECEIVER = [
    STEP,
    Event(Activity.WAIT, "F", 1, 0, 0, 2_000, 9_500),
    Event(Activity.COMPUTE, "F", 1, 0, None, 9_500, 20_000),
]


def load(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())
    return found


def test_the_file_is_complete_after_each_step(tmp_path: Path) -> None:
    writer = TimelineWriter(tmp_path / "trace.json", pipeline=3, ranks=2)
    writer.create()
    assert {event["args"]["name"] for event in load(writer.path) if event["name"] == "thread_name"} == {
        "rank 0",
        "rank 1",
    }
    for step in range(2):
        writer.append(step, "train", {0: SENDER, 1: RECEIVER})
        slices = [event for event in load(writer.path) if event["ph"] == "X"]
        assert len(slices) == 6 * (step + 1)
    assert all(event["pid"] == 3 for event in load(writer.path))
    assert slices[1] == {
        "ph": "X", "name": "F s0 mb0", "cat": "compute", "pid": 3, "tid": 0, "ts": 0.0, "dur": 5.0,
        "args": {"step": 0, "kind": "F", "stage": 0, "microbatch": 0},
    }  # fmt: skip
    writer.create()
    assert all(event["ph"] == "M" for event in load(writer.path))


def test_an_arrow_goes_from_the_send_into_the_wait(tmp_path: Path) -> None:
    writer = TimelineWriter(tmp_path / "trace.json", pipeline=0, ranks=2)
    writer.create()
    writer.append(0, "train", {0: SENDER, 1: RECEIVER})
    writer.append(1, "train", {0: SENDER, 1: RECEIVER})
    writer.append(2, "train, cut short", {1: RECEIVER})
    arrows = [event for event in load(tmp_path / "trace.json") if event["ph"] in "sf"]
    assert [(arrow["ph"], arrow["tid"], arrow["ts"], arrow["id"]) for arrow in arrows] == [
        ("s", 0, 5.0, 0), ("f", 1, 9.499, 0), ("s", 0, 5.0, 1), ("f", 1, 9.499, 1),
    ]  # fmt: skip


def test_each_replica_has_its_own_file() -> None:
    assert TimelineWriter(Path("a/trace.json"), 0, 1).path == Path("a/trace.json")
    assert TimelineWriter(Path("a/trace.json"), 2, 1).path == Path("a/trace.pipeline2.json")


@pytest.mark.parametrize(
    ("event", "name"),
    [
        (Event(Activity.COMPUTE, "F", 2, 5, None, 0, 1), "F s2 mb5"),
        (Event(Activity.SEND, "F", 2, 5, 3, 0, 1), "send F s2 mb5 to s3"),
        (Event(Activity.WAIT_SENT, "B", 2, 0, 1, 0, 1), "wait sent B s2 mb0 to s1"),
    ],
)
def test_names_have_stage_and_microbatch(event: Event, name: str) -> None:
    assert event.name == name


def test_paths_that_cannot_be_written_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="there is no folder"):
        check_path(tmp_path / "none" / "trace.json")
    with pytest.raises(ValueError, match="is a folder"):
        check_path(tmp_path)
    with pytest.raises(ValueError, match="is a folder"):
        check_path("")
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(ValueError, match="a pipe or a device"):
        check_path(tmp_path / "pipe.json")
    with pytest.raises(TypeError, match="must be the path of a file"):
        check_path(True)
    assert check_path(str(tmp_path / "trace.json")) == tmp_path / "trace.json"
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ValueError, match="no permission"):
        check_path(tmp_path / "trace.json")

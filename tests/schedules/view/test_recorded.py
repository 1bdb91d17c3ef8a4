"""Recorded timelines: complete files, cut files, and other files."""

import json
from pathlib import Path

import pytest

from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.simulate import Timeline, simulate
from nxdpp.schedules.view.recorded import RecordedTimeline
from tests.schedules.view.timeline_files import events, heads, text

SCHEDULE = FAMILIES["1f1b"].build(4, 6)


@pytest.fixture
def timeline() -> Timeline:
    return simulate(SCHEDULE, 1.0, 0.5, 1.5, 0.25)


def slice_of(category: str, step: object) -> dict[str, object]:
    return {"ph": "X", "name": "a", "tid": 0, "ts": 0, "dur": 1, "cat": category, "args": {"step": step}}


def write(folder: Path, content: str) -> Path:
    path = folder / "trace.json"
    path.write_text(content)
    return path


def test_a_step_is_what_was_written(tmp_path: Path, timeline: Timeline) -> None:
    path = write(tmp_path, text(heads(4) + events(timeline, 0) + events(timeline, 3, 0.25)))
    recording = RecordedTimeline(path)

    step = recording.step()
    assert recording.describe() == "steps 0, 3"
    assert step.name == "step 3, train, made up"
    assert step.schedule == SCHEDULE
    assert step.timeline.makespan == pytest.approx(timeline.makespan)
    assert step.timeline.bubbles == pytest.approx(timeline.bubbles)
    assert step.timeline.peaks == timeline.peaks
    # A simulated rank waits whenever it does not compute, up to its last action.
    last = timeline.spans[2][-1].end
    assert step.waited(2) == pytest.approx(last - sum(span.end - span.start for span in timeline.spans[2]))
    assert step.started(2) == pytest.approx(0.0, abs=1e-6)
    assert RecordedTimeline(path).step(0).name == "step 0, train, made up"


def test_time_spent_on_sends_is_not_counted_twice(tmp_path: Path, timeline: Timeline) -> None:
    parts = events(timeline, 0)
    send = {**next(event for event in parts if event["tid"] == 0), "cat": "send", "ts": 7e6 + 1000, "dur": 500}
    within = {**send, "cat": "wait sent", "ts": 7e6 + 1200, "dur": 200}
    late = {**send, "ts": 7e6 + 1e6}
    without = RecordedTimeline(write(tmp_path, text(heads(4) + parts))).step()
    step = RecordedTimeline(write(tmp_path, text([*heads(4), *parts, send, within, late]))).step()
    assert step.started(0) == pytest.approx(0.3)
    assert step.waited(0) == pytest.approx(without.waited(0) + 0.2)


@pytest.mark.parametrize("cut", [1, 2, 30, 200, 3000])
def test_a_file_that_was_cut_off_has_its_complete_steps(tmp_path: Path, timeline: Timeline, cut: int) -> None:
    whole = text(heads(4) + events(timeline, 0))
    rest = ",\n" + text(events(timeline, 1))[2:]
    recording = RecordedTimeline(write(tmp_path, whole[:-3] + rest[:-cut]))
    if cut <= 2:
        assert recording.describe() == "steps 0 to 1"
    else:
        assert recording.describe() == "steps 0; cut short: 1"
        assert recording.step().name.startswith("step 0")
        with pytest.raises(ValueError, match=r"step 1 was cut short in .*; whole steps: 0"):
            recording.step(1)


def test_a_step_of_some_ranks_only_is_cut_short(tmp_path: Path, timeline: Timeline) -> None:
    partial = [event for event in events(timeline, 1) if event["tid"] == 2]
    recording = RecordedTimeline(write(tmp_path, text(heads(4) + events(timeline, 0) + partial)))
    assert recording.describe() == "steps 0; cut short: 1"
    with pytest.raises(ValueError, match=r"step 2 is not there in .*; whole steps: 0"):
        recording.step(2)


def test_a_run_without_a_complete_step(tmp_path: Path, timeline: Timeline) -> None:
    with pytest.raises(ValueError, match="no whole step: the run ended before its first step did"):
        RecordedTimeline(write(tmp_path, text(heads(4)))).step()


@pytest.mark.parametrize(
    "content",
    [
        "", "[", "nonsense", "{}", "[1]", "[]", '"text"', '{"traceEvents": 1}',
        '[{"ph": "X", "name": "aten::add", "ts": 1, "dur": 1, "args": {"External id": 1}}]',
        '[{"ph": "M", "name": "thread_name", "pid": 0, "tid": "stream 7", "args": {}}]',
        json.dumps([*heads(1), *(slice_of(category, 0) for category in ("step", "compute"))]),
        json.dumps([*heads(1), slice_of("step", [])]),
    ],
)  # fmt: skip
def test_other_json_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(ValueError, match=r"trace\.json (is no|cannot be read)"):
        RecordedTimeline(write(tmp_path, content))


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read as a timeline"):
        RecordedTimeline(tmp_path / "none.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="cannot be read as a timeline"):
        RecordedTimeline(tmp_path / "bytes.json")

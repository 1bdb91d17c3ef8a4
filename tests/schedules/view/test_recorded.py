"""Recorded timelines: complete files, cut files, other files, and measured times."""

import json
import os
from pathlib import Path

import pytest

from nxdpp.schedules.families.forward_only import forward_only
from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.simulate import Timeline, simulate
from nxdpp.schedules.timeline_file import Activity
from nxdpp.schedules.view.recorded import RecordedStep, RecordedTimeline
from tests.schedules.pipelines import PARTLY_SPLIT, SPLIT
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


def test_the_step_by_default_is_the_last_one_that_trained(tmp_path: Path, timeline: Timeline) -> None:
    forwards = forward_only(FAMILIES["1f1b"].placement(4, 1), 6)
    evaluated = simulate(forwards, 1.0, 0.5, 1.5, 0.25)
    path = write(tmp_path, text(heads(4) + events(timeline, 0) + events(timeline, 1) + events(evaluated, 2)))
    recording = RecordedTimeline(path)
    assert recording.step().name.startswith("step 1,")
    assert recording.step(2).schedule == forwards
    alone = RecordedTimeline(write(tmp_path, text(heads(4) + events(evaluated, 0) + events(evaluated, 1))))
    assert alone.step().name.startswith("step 1,")


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
    # To open a pipe without a writer would block.
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(ValueError, match="cannot be read as a timeline: it is a pipe or a device"):
        RecordedTimeline(tmp_path / "pipe.json")


def record(folder: Path, timeline: Timeline, transfer: float) -> RecordedStep:
    return RecordedTimeline(write(folder, text(heads(len(timeline.spans)) + events(timeline, 0, transfer)))).step()


@pytest.mark.parametrize("name", list(FAMILIES))
def test_a_simulated_step_is_simulated_again(tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]
    schedule = family.build(4, 8)
    stages = 1 + max(action.stage for actions in schedule for action in actions)
    forward = [1.0 + stage / 10 for stage in range(stages)]
    timeline = simulate(schedule, forward, 0.75, 1.25, 0.3)
    step = record(tmp_path, timeline, 0.3)
    times = step.measured_times()

    assert times.forward == pytest.approx(forward)
    splits = name in SPLIT + PARTLY_SPLIT
    assert times.input_gradient == pytest.approx([0.75 if splits else 2.0] * stages)
    assert times.weight_gradient == pytest.approx([1.25 if splits else 0.0] * stages)
    again = simulate(step.schedule, *times)
    assert again.makespan == pytest.approx(timeline.makespan)
    assert again.bubbles == pytest.approx(timeline.bubbles)


def test_measured_times_of_forwards_alone(tmp_path: Path) -> None:
    schedule = forward_only(FAMILIES["1f1b"].placement(4, 1), 8)
    timeline = simulate(schedule, 1.0, transfer=0.3)
    step = record(tmp_path, timeline, 0.3)
    times = step.measured_times()
    assert times.input_gradient == [0.0] * 4
    assert times.transfer == pytest.approx([0.3, 0.3, 0.3, 0.0])
    assert simulate(step.schedule, *times).makespan == pytest.approx(timeline.makespan)


def test_one_slow_microbatch_is_lost_time(tmp_path: Path) -> None:
    usual = simulate(FAMILIES["1f1b"].build(2, 6), 1.0, 1.0, 1.0)
    step = record(tmp_path, usual, 0.0)
    *before, slow = step.ranks[1]
    assert slow.activity is Activity.COMPUTE
    slowed = RecordedStep(step.name, [step.ranks[0], [*before, slow._replace(end=slow.end + 5_000_000)]])
    assert slowed.timeline.makespan > step.timeline.makespan
    assert simulate(slowed.schedule, *slowed.measured_times()).makespan == pytest.approx(usual.makespan)


def test_a_transfer_without_a_wait_took_at_most_the_lowest_bound(tmp_path: Path) -> None:
    # The first stage is so fast that the other one has its inputs before it asks for them, but for the first.
    timeline = simulate(FAMILIES["gpipe"].build(2, 4), [0.1, 3.0], 1.0, 1.0, 0.2)
    step = record(tmp_path, timeline, 0.2)
    assert step.measured_times().transfer[0] == pytest.approx(0.2)
    late = [
        [event for event in events if event.activity is not Activity.WAIT or (event.kind == "F" and event.microbatch)]
        for events in step.ranks
    ]
    waits = [event for event in late[1] if event.activity is Activity.WAIT]
    lowest = min(wait.end / 1e6 - 0.1 * (1 + (wait.microbatch or 0)) for wait in waits)
    assert RecordedStep(step.name, late).measured_times().transfer[0] == pytest.approx(lowest)

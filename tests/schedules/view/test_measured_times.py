"""Simulation of a step from its measured times."""

from pathlib import Path

import pytest

from nxdpp.schedules.families.forward_only import forward_only
from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.simulate import Timeline, simulate
from nxdpp.schedules.timeline_file import Activity
from nxdpp.schedules.view.recorded import RecordedStep, RecordedTimeline
from tests.schedules.pipelines import SPLIT
from tests.schedules.view.timeline_files import events, heads, text


def record(folder: Path, timeline: Timeline, transfer: float) -> RecordedStep:
    path = folder / "trace.json"
    path.write_text(text(heads(len(timeline.spans)) + events(timeline, 0, transfer)))
    return RecordedTimeline(path).step()


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
    splits = name in SPLIT
    assert times.input_gradient == pytest.approx([0.75 if splits else 2.0] * stages)
    assert times.weight_gradient == pytest.approx([1.25 if splits else 0.0] * stages)
    again = simulate(step.schedule, *times)
    assert again.makespan == pytest.approx(timeline.makespan)
    assert again.bubbles == pytest.approx(timeline.bubbles)


def test_forwards_alone(tmp_path: Path) -> None:
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

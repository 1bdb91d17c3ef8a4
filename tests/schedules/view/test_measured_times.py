"""Times put back into the simulator give the step they were taken from."""

from pathlib import Path

import pytest

from nxdpp.schedules.families.forward_only import forward_only
from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.simulate import Timeline, simulate
from nxdpp.schedules.view.measured_times import measured_times
from nxdpp.schedules.view.recorded import RecordedStep, RecordedTimeline
from tests.schedules.view.traces import events, heads, text


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
    times = measured_times(step)

    assert times.forward == pytest.approx(forward)
    splits = family.splits_backward
    assert times.input_gradient == pytest.approx([0.75 if splits else 2.0] * stages)
    assert times.weight_gradient == pytest.approx([1.25 if splits else 0.0] * stages)
    assert times.simulate(step).makespan == pytest.approx(timeline.makespan)
    assert times.simulate(step).bubbles == pytest.approx(timeline.bubbles)


def test_forwards_alone(tmp_path: Path) -> None:
    schedule = forward_only(FAMILIES["1f1b"].placement(4, 1), 8)
    timeline = simulate(schedule, 1.0, transfer=0.3)
    step = record(tmp_path, timeline, 0.3)
    times = measured_times(step)
    assert times.input_gradient == [0.0] * 4
    assert times.transfer == pytest.approx([0.3, 0.3, 0.3, 0.0])
    assert times.simulate(step).makespan == pytest.approx(timeline.makespan)


def test_one_slow_microbatch_is_time_lost(tmp_path: Path) -> None:
    schedule = FAMILIES["1f1b"].build(2, 6)
    usual = simulate(schedule, 1.0, 1.0, 1.0)
    step = record(tmp_path, usual, 0.0)
    slow = step.ranks[1].computes[-1]
    step.ranks[1].computes[-1] = slow.__class__(slow.action, slow.start, slow.end + 5)
    assert measured_times(step).simulate(step).makespan == pytest.approx(usual.makespan)


def test_a_transfer_that_nobody_waited_for_took_no_longer_than_the_shortest_known(tmp_path: Path) -> None:
    # The first stage is so fast that the other one has what it needs before it asks for it, but for the first.
    timeline = simulate(FAMILIES["gpipe"].build(2, 4), [0.1, 3.0], 1.0, 1.0, 0.2)
    step = record(tmp_path, timeline, 0.2)
    assert measured_times(step).transfer[0] == pytest.approx(0.2)
    for rank in step.ranks:
        rank.arrivals = [arrival for arrival in rank.arrivals if arrival.kind == "F" and arrival.microbatch > 0]
    shortest = min(arrival.wait.end - 0.1 * (1 + arrival.microbatch) for arrival in step.ranks[1].arrivals)
    assert measured_times(step).transfer[0] == pytest.approx(shortest)

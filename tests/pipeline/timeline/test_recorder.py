"""Recording of a step."""

import pytest
import torch

from nxdpp.pipeline.timeline.recorder import StepRecorder
from nxdpp.schedules.actions import Action, ActionKind
from nxdpp.schedules.timeline_file import Activity


def test_a_computation_begins_when_its_wait_is_over() -> None:
    recorder = StepRecorder()
    recorder.begin(torch.device("cpu"))

    def forward() -> None:
        recorder.add(Activity.WAIT, "F", 1, 0, 0, recorder.stamp())

    recorder.record(Action(1, ActionKind.FORWARD, 0), forward)
    recorder.record(Action(1, ActionKind.BACKWARD, 0), lambda: None)
    step, wait, first, second = recorder.end(ahead=0)

    assert [event.name for event in (wait, first, second)] == ["wait F s1 mb0 from s0", "F s1 mb0", "B s1 mb0"]
    assert step.start <= wait.start <= wait.end == first.start <= first.end <= second.start <= second.end <= step.end


def test_a_computation_that_fails_is_the_last_event() -> None:
    recorder = StepRecorder()
    recorder.begin(torch.device("cpu"))

    def forward() -> None:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        recorder.record(Action(1, ActionKind.FORWARD, 2), forward)
    assert recorder.end(ahead=0)[-1].name == "F s1 mb2"


def test_a_step_is_recorded_alone_and_on_the_other_clock() -> None:
    recorder = StepRecorder()
    recorder.begin(torch.device("cpu"))
    recorder.record(Action(0, ActionKind.FORWARD, 0), lambda: None)
    here, there = recorder.end(ahead=0)[1], recorder.end(ahead=1000)[1]
    assert (there.start, there.end) == (here.start + 1000, here.end + 1000)
    recorder.begin(torch.device("cpu"))
    assert [event.activity for event in recorder.end(ahead=0)] == [Activity.STEP]

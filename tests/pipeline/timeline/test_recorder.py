"""Recording of a step; without a recorder the engine has plain calls."""

import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nxdpp import NxDPPModel, parallel_state
from nxdpp.pipeline.p2p.channel import LocalChannel, RemoteChannel
from nxdpp.pipeline.runtime.engine import Engine
from nxdpp.pipeline.runtime.stage_runner import StageRunner
from nxdpp.pipeline.timeline.recorder import RecordedChannel, StepRecorder
from nxdpp.schedules.actions import Action, ActionKind
from nxdpp.schedules.timeline_file import Activity
from tests.support.models import make, padded_batch
from tests.support.run_ranks import run_ranks


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


def owners_of_calls(rank: int, folder: str | None) -> set[type[Any]]:
    """Return the classes whose methods the engine calls."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    path = None if folder is None else f"{folder}/trace.json"
    wrapped = NxDPPModel(make("llama"), num_microbatches=4, virtual_pipeline_size=2, trace_file_path=path)
    wrapped.run_train(**padded_batch(4))
    (engine,) = [found for found in gc.get_objects() if type(found) is Engine]
    channels = [*engine._channels_in.values(), *engine._channels_out.values()]
    plain = {type(channel) for of_stage in channels for channel in of_stage.values()} <= {RemoteChannel, LocalChannel}
    assert plain == (folder is None)
    return {type(getattr(call.func, "__self__", None)) for call in engine._calls if isinstance(call, partial)}


def test_no_call_is_around_another(tmp_path: Path) -> None:
    assert run_ranks(2, owners_of_calls, None) == [{RemoteChannel, StageRunner}] * 2
    assert run_ranks(2, owners_of_calls, str(tmp_path)) == [{RecordedChannel, StageRunner}] * 2

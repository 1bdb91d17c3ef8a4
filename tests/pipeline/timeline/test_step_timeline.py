"""Timeline files of real runs: every event once, on one clock, and readable after a failure."""

import json
import os
import signal
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from nxdpp import NxDPPModel, parallel_state
from nxdpp.pipeline.timeline import step_timeline
from nxdpp.pipeline.timeline.step_timeline import offset_to_first
from nxdpp.schedules.families.registry import find_family
from tests.pipeline.in_turn import run_in_turn
from tests.schedules.pipelines import SPLIT
from tests.support.models import gradient_differences, make, padded_batch, reference, train_in_one_process
from tests.support.run_ranks import DEVICE, run_ranks

MICROBATCHES = 4
RANKS = 2


def load(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())
    return found


def train(rank: int, path: str, schedule: str) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=RANKS)
    model = make("llama")
    whole = reference(model)
    wrapped = NxDPPModel(
        model,
        num_microbatches=MICROBATCHES,
        virtual_pipeline_size=2,
        schedule=schedule,
        deallocate_pipeline_outputs=schedule == "interleaved",
        trace_file_path=path,
    )
    batch = padded_batch(MICROBATCHES)
    wrapped.run_train(**batch)
    train_in_one_process(whole, batch, MICROBATCHES)
    assert gradient_differences(wrapped, whole) == {}
    wrapped.run_train(**batch)
    wrapped.run_eval(**batch)


def expected_names(schedule: str, trains: bool) -> Counter[str]:
    """Return the names of all events of a chain of stages."""
    family = find_family(schedule)
    placement = family.placement(RANKS, None)
    backward = "" if not trains else "IW" if schedule in SPLIT else "B"
    stages = placement.stages
    names: list[str] = []
    for microbatch in range(MICROBATCHES):
        for stage in range(stages):
            at = f"s{stage} mb{microbatch}"
            transfers = [("F", stage, stage + 1)] + ([("B", stage + 1, stage)] if trains else [])
            names += [f"{kind} {at}" for kind in f"F{backward}"]
            if stage + 1 == stages or placement.rank_of(stage) == placement.rank_of(stage + 1):
                continue
            for kind, sender, receiver in transfers:
                here, there = f"{kind} s{sender} mb{microbatch}", f"{kind} s{receiver} mb{microbatch}"
                names += [f"send {here} to s{receiver}", f"wait sent {here} to s{receiver}"]
                names += [f"receive {there} from s{sender}", f"wait {there} from s{sender}"]
    return Counter(names)


def test_every_event_is_there_once(tmp_path: Path) -> None:
    paths = {schedule: tmp_path / schedule / "trace.json" for schedule in ("interleaved", "zb-v")}
    for path in paths.values():
        path.parent.mkdir()
    run_in_turn(RANKS, *((train, str(path), schedule) for schedule, path in paths.items()))
    for schedule, path in paths.items():
        slices = [event for event in load(path) if event["ph"] == "X"]
        for step, trains in enumerate((True, True, False)):
            of_step = [event for event in slices if event["args"]["step"] == step]
            told = [event["name"] for event in of_step if event["cat"] not in ("step", "wait metadata")]
            assert Counter(told) == expected_names(schedule, trains)
            _check_order(of_step)
            assert {event["name"].partition(", ")[0::2] for event in of_step if event["cat"] == "step"} == {
                (f"step {step}", f"{'train' if trains else 'eval'}, {schedule}")
            }
        assert sorted(path.parent.iterdir()) == [path]


def _check_order(events: list[dict[str, Any]]) -> None:
    """Computations of a rank are in sequence within the step, each after its inputs were computed and received."""
    spans = {event["name"]: (event["ts"], event["ts"] + event["dur"]) for event in events}
    for rank in range(RANKS):
        own = [event for event in events if event["tid"] == rank]
        (whole,) = [event for event in own if event["cat"] == "step"]
        computes = sorted((e["ts"], e["ts"] + e["dur"]) for e in own if e["cat"] == "compute")
        assert computes[0][0] >= whole["ts"]
        assert computes[-1][1] <= whole["ts"] + whole["dur"]
        assert all(before[1] <= after[0] for before, after in pairwise(computes))
    for event in events:
        if event["cat"] == "wait":
            said = event["args"]
            kinds = ("F",) if said["kind"] == "F" else ("B", "I")
            made, used = (
                next(spans[name] for kind in kinds if (name := f"{kind} s{stage} mb{said['microbatch']}") in spans)
                for stage in (said["other"], said["stage"])
            )
            # The ranks share the clock of this machine. That of a device begins when a host sees its first event, which
            # a busy machine delays by a slice of time.
            late = 0.0 if os.environ[DEVICE] == "cpu" else 2e4
            assert made[1] - late <= spans[event["name"]][1] <= used[0] + 1e-3


def train_replicas(rank: int, path: str) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    NxDPPModel(make("llama", layers=2), num_microbatches=2, trace_file_path=path).run_train(**padded_batch(2))


def test_each_replica_has_its_file(tmp_path: Path) -> None:
    run_ranks(4, train_replicas, str(tmp_path / "trace.json"))
    for pipeline, name in enumerate(("trace.json", "trace.pipeline1.json")):
        computes = [event for event in load(tmp_path / name) if event.get("cat") == "compute"]
        assert len(computes) == 8
        exchanges = {event["name"] for event in load(tmp_path / name) if event.get("cat") == "exchange"}
        assert exchanges == {f"{kind} s{stage} mb1" for kind in ("AVERAGE", "AVERAGED") for stage in range(2)}
        assert {event["pid"] for event in computes} == {pipeline}


def train_until_cut(rank: int, path: str, how: str) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=RANKS)
    wrapped = NxDPPModel(make("llama", layers=2), num_microbatches=4, trace_file_path=path)
    calls = 0

    def break_in_second_step(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == 7 and how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if calls == 7:
            raise ArithmeticError("the layer broke")

    if rank == 1:
        dict(wrapped.local_named_modules())["model.layers.1"].register_forward_hook(break_in_second_step)
    for _ in range(3):
        wrapped.run_train(**padded_batch(4))


@pytest.mark.parametrize("how", ["error", "kill"])
def test_the_file_of_a_run_that_is_cut_short_loads(tmp_path: Path, how: str) -> None:
    path = tmp_path / "trace.json"
    with pytest.raises(AssertionError):
        run_ranks(RANKS, train_until_cut, str(path), how)
    events = [event for event in load(path) if event.get("cat") == "compute"]
    assert {event["tid"] for event in events if event["args"]["step"] == 0} == {0, 1}
    # A failed rank writes its events until then, a killed rank writes none.
    of_broken = [event["name"] for event in events if event["args"]["step"] == 1 and event["tid"] == 1]
    assert of_broken[-1:] == ([] if how == "kill" else ["F s1 mb2"])


class _Shifted:
    """``time`` on a rank whose clock is behind."""

    def __init__(self, behind: int) -> None:
        self._behind = behind

    def perf_counter_ns(self) -> int:
        return time.perf_counter_ns() - self._behind


def measure_offsets(rank: int) -> tuple[int, int]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    group = parallel_state.get_pipeline_control_group()
    same = offset_to_first(group)
    setattr(step_timeline, "time", _Shifted(rank * 10**12))  # noqa: B010
    return same, offset_to_first(group)


def test_offsets_of_processes() -> None:
    for rank, (same, shifted) in enumerate(run_ranks(2, measure_offsets)):
        assert same == 0
        # The error is at most half of the quickest of five round trips.
        assert abs(shifted - rank * 10**12) < 10**8

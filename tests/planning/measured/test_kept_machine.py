"""Figures of this machine: measured, kept, and refused where they are of another one."""

import json
import os
import re
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import nxdpp
from nxdpp.planning.layout import Layout
from nxdpp.planning.machine import Link
from nxdpp.planning.measured import kept_machine, rank
from nxdpp.planning.measured.kept_machine import KeptMachine, measured_machine, place
from nxdpp.planning.measured.rank import RankFigures
from nxdpp.planning.plan import Plan
from nxdpp.tracing.costs.measure import Seconds, measure_nodes
from nxdpp.version import __version__
from tests.planning.test_planner import CPU, Stack
from tests.support.run_ranks import run_ranks

INPUTS = {"states": torch.zeros(3, 16)}
# In the place of a rank's measurements.
SLEEPS = """
import os, sys, time
if "nxdpp.planning.measured.rank" in sys.orig_argv and "torch.distributed.run" not in sys.orig_argv:
    open(os.path.join({folder!r}, f"{{os.getpid()}}.pid"), "w").close()
    time.sleep(200)
"""


FIGURES = {"flops_2": 1e9, "flops_4": 1e9, "bandwidth": 1e9, "operation": 1e-6, "action": 1e-6}


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """The numbers of ranks of measurements, which do not run; a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made: list[int] = []

    def measured(kind: str, ranks: int, at_once: int) -> dict[str, float]:
        made.append(ranks)
        return dict(FIGURES)

    monkeypatch.setattr(kept_machine, "_measured", measured)
    return made


def names_of_messages(own: int, file: Path) -> list[str]:
    """Measure shortly; return the names of the figures of messages."""
    names: list[str] = []
    messages = RankFigures._messages

    def watched(figures: RankFigures) -> dict[str, float]:
        found = messages(figures)
        names.extend(found)
        return found

    # Other work on this machine disturbs the link.
    with (
        patch.multiple(rank, _REPEATS=3, _LONGER=0, _SECONDS=0.02, _ACTIONS=2),
        patch.object(RankFigures, "_messages", watched),
    ):
        rank.main("cpu", 2, file)
    return names


def test_figures_are_of_operations_and_links(tmp_path: Path) -> None:
    """The last of three ranks has no partner for messages."""
    both = ["message_rate", "message_latency"]

    assert run_ranks(3, names_of_messages, tmp_path / "figures.json") == [both, both, []]

    figures = json.loads((tmp_path / "figures.json").read_text())
    links = {"all_reduce", "reduce_scatter", "all_gather", "latency", *both}
    assert figures.keys() == FIGURES.keys() | links
    machine = KeptMachine("cpu", {"cores": 3, "threads": 1}, figures)
    assert 1e7 < machine.device.flops(torch.float32) < 1e13
    assert machine.link is not None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"torch": "1.0"}, r"torch 1\.0, not"),
        ({"processor": "Z80"}, "processor Z80, not"),
        (None, "JSONDecodeError"),
    ],
)
def test_figures_of_another_machine_are_measured_again(
    again: list[int], change: dict[str, str] | None, reason: str
) -> None:
    measured_machine("cpu", 2)
    kept = measured_machine("cpu", 2)
    assert (kept.figures, kept.about["nxdpp"], kept.note, again) == (FIGURES, __version__, "", [2])
    file = place("cpu", 2)
    content = json.loads(file.read_text())
    file.write_text("{" if change is None else json.dumps(content | {"about": content["about"] | change}))

    found = measured_machine("cpu", 2)

    assert again == [2, 2]
    assert re.search(rf"is not of this machine \({reason}", found.note)


def test_layers_are_measured_once(again: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def plan() -> Plan:
        return nxdpp.plan(Stack(), devices=1, global_batch=2, inputs=INPUTS, costs="measured", best=1, **CPU)

    first = plan()
    monkeypatch.setattr("nxdpp.planning.model_costs.measure_nodes", None)
    counted = nxdpp.plan(Stack(), devices=1, global_batch=2, inputs=INPUTS, best=1, **CPU)

    assert plan().first == first.first
    assert counted.first.times[0].compute != first.first.times[0].compute
    assert 0 < first.first.step_seconds < 10
    assert json.loads(place("cpu", 2).read_text())["layers"]


@pytest.mark.filterwarnings("ignore:.*this plan was not compared")
def test_divided_layers_are_measured_too(again: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """One process measures the layers of a rank of each tensor group; nothing is sent."""
    monkeypatch.setattr(kept_machine, "_busy", lambda _: nullcontext())
    shapes: list[torch.Size] = []

    def measured(traced: Any, root: nn.Module, *options: Any) -> dict[Any, Seconds]:
        shapes.append(root.get_parameter("layers.0.linear.weight").shape)
        return measure_nodes(traced, root, *options)

    monkeypatch.setattr("nxdpp.planning.model_costs.measure_nodes", measured)
    job: dict[str, Any] = {"devices": 2, "global_batch": 2, "inputs": INPUTS, "costs": "measured"}
    plans = {"layers.*.linear": "colwise_gather_output"}
    nxdpp.plan(Stack(), layouts=[Layout(tensor=2), Layout(pipeline=2)], tensor_plan=plans, **job, **CPU)

    assert shapes == [(8, 16), (16, 16)]


def test_ranks_are_at_most_the_devices_of_a_host(again: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1,2")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)
    neighbours: list[int] = []

    def busy(count: int) -> AbstractContextManager[None]:
        neighbours.append(count)
        return nullcontext()

    monkeypatch.setattr(kept_machine, "_busy", busy)

    for most in (None, 4, 1):
        measured_machine("cpu", most).factors("layers", lambda _: [[1.0, 1.0]])

    assert again == [64, 4, 2]
    assert neighbours == [63, 3, 1]


def test_ranks_that_would_share_cores_are_refused(again: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2), raising=False)
    monkeypatch.setattr(KeptMachine, "factors", lambda *_: [[1.0, 1.0]] * 4)

    def plan(devices: int, hosts: int) -> Plan:
        job: dict[str, Any] = {"devices": devices, "hosts": hosts, "global_batch": 8, "link": "1GB/s"}
        layouts = [Layout(data=devices)]
        return nxdpp.plan(Stack(), inputs=INPUTS, layouts=layouts, costs="measured", **job, **CPU)

    with pytest.raises(ValueError, match=r"devices=8 on 2 hosts .* those of 2 ranks\. Plan for at most 4 devices"):
        plan(8, 2)
    assert plan(4, 2).first.times[0].compute > 0


def test_ranks_end_with_their_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A killed torchrun would leave them."""
    (tmp_path / "sitecustomize.py").write_text(SLEEPS.format(folder=str(tmp_path)))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def wait(self: subprocess.Popen[str], timeout: float) -> None:
        deadline = time.monotonic() + 60
        while not (ranks := list(tmp_path.glob("*.pid"))) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert ranks
        raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", wait)
    with pytest.raises(RuntimeError, match="the ranks that measure this machine take more than 600 s"):
        kept_machine._measured("cpu", 1, 1)

    (rank,) = tmp_path.glob("*.pid")
    with pytest.raises(ProcessLookupError):
        os.kill(int(rank.stem), 0)


def test_a_disturbed_link_is_no_link() -> None:
    figures = object.__new__(RankFigures)
    figures.__dict__ |= {"_device": torch.device("cpu")}

    def line(*seconds: float) -> Link:
        left = iter(seconds)
        return figures._line("messages", lambda _: next(left), float)

    assert line(0.001, 0.008).bytes_per_second == pytest.approx((2**23 - 2**16) / 0.007)
    for large in (0.001, 0.0011, -0.1):
        with pytest.raises(RuntimeError, match="other processes disturb the link"):
            line(0.001, large)


def test_devices_that_are_not_here_are_refused() -> None:
    for kind in ("xla",) if torch.cuda.is_available() else ("xla", "cuda"):
        with pytest.raises(ValueError, match=f"this machine has no {kind} device to measure"):
            measured_machine(kind)
    with pytest.raises(ValueError, match="peak and bandwidth are measured"):
        nxdpp.plan(nn.Linear(1, 1), devices=1, global_batch=1, inputs=INPUTS, costs="measured", peak=1e9, **CPU)

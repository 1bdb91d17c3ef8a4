"""Figures of this machine: measured, kept, and refused where they are of another one."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

import nxdpp
from nxdpp.__main__ import main
from nxdpp.planning.layout import Layout
from nxdpp.planning.machine import DEVICES, Link
from nxdpp.planning.measured import kept_machine, rank
from nxdpp.planning.measured.kept_machine import KeptMachine, measured_machine, place
from nxdpp.planning.measured.rank import RankFigures
from nxdpp.planning.plan import Plan
from nxdpp.tracing.costs.measure import Seconds, measure_nodes
from nxdpp.version import __version__
from tests.planning.test_plan_command import CONFIG, SEARCH
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


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="module")
def machine(cache: Path) -> KeptMachine:
    for _ in range(3):
        try:
            return measured_machine("cpu", 2)
        except RuntimeError as error:
            # Other tests run at the same time.
            if "other processes disturb the link" not in str(error):
                raise
    return measured_machine("cpu", 2)


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of ranks of measurements, which do not run."""
    made: list[int] = []

    def measured(kind: str, ranks: int, at_once: int) -> dict[str, float]:
        made.append(ranks)
        return {"flops_2": 1e9, "flops_4": 1e9, "bandwidth": 1e9, "operation": 1e-6, "action": 1e-6}

    monkeypatch.setattr(kept_machine, "_measured", measured)
    return made


def test_figures_are_of_operations_and_links(machine: KeptMachine) -> None:
    links = {"all_reduce", "reduce_scatter", "all_gather", "latency", "message_rate", "message_latency"}
    assert machine.figures.keys() == {"flops_2", "flops_4", "bandwidth", "operation", "action", *links}
    assert all(figure >= 0 for figure in machine.figures.values())
    assert 1e8 < machine.device.flops(torch.float32) < 1e13
    assert machine.link is not None
    assert machine.cores is not None


def test_kept_figures_are_not_measured_again(machine: KeptMachine, again: list[int]) -> None:
    found = measured_machine("cpu", 2)

    assert found.about["nxdpp"] == __version__
    assert (found.figures, found.about, found.note) == (machine.figures, machine.about, "")
    assert again == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"torch": "1.0"}, r"torch 1\.0, not"),
        ({"nxdpp": "0.1"}, r"nxdpp 0\.1, not"),
        ({"processor": "Z80"}, "processor Z80, not"),
        ({"format": 1}, "format 1, not"),
        (None, "JSONDecodeError"),
    ],
)
def test_figures_of_another_machine_are_measured_again(
    machine: KeptMachine, again: list[int], change: dict[str, str] | None, reason: str
) -> None:
    file = place("cpu", 2)
    before = file.read_text()
    content = json.loads(before)
    file.write_text("{" if change is None else json.dumps(content | {"about": content["about"] | change}))
    try:
        found = measured_machine("cpu", 2)
        assert again == [2]
        assert not found.layers
        assert re.search(rf"is not of this machine \({reason}", found.note)
    finally:
        file.write_text(before)


def test_layers_are_measured_once(machine: KeptMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    def plan() -> Plan:
        return nxdpp.plan(Stack(), devices=1, global_batch=2, inputs=INPUTS, costs="measured", best=1, **CPU)

    first = plan()
    monkeypatch.setattr("nxdpp.planning.model_costs.measure_nodes", None)
    counted = nxdpp.plan(Stack(), devices=1, global_batch=2, inputs=INPUTS, best=1, **CPU)

    assert plan().first == first.first
    assert counted.first.times[0].compute != first.first.times[0].compute
    assert 0 < first.first.step_seconds < 10
    assert json.loads(place("cpu", 2).read_text())["layers"]


def test_divided_layers_are_measured_too(again: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One process measures the layers of a rank of each tensor group; nothing is sent."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kept_machine, "busy", lambda _: nullcontext())
    shapes: list[torch.Size] = []

    def measured(traced: Any, root: nn.Module, *options: Any) -> dict[Any, Seconds]:
        shapes.append(root.get_parameter("model.layers.0.mlp.up_proj.weight").shape)
        return measure_nodes(traced, root, *options)

    monkeypatch.setattr("nxdpp.planning.model_costs.measure_nodes", measured)
    config = LlamaConfig.from_dict(CONFIG)
    layouts = [Layout(tensor=2), Layout(tensor=2, sequence=True), Layout(pipeline=2)]
    nxdpp.plan(config, devices=2, global_batch=2, seq_length=8, layouts=layouts, costs="measured", **CPU)

    width, hidden = config.intermediate_size, config.hidden_size
    assert shapes == [(width // 2, hidden), (width // 2, hidden), (width, hidden)]


def test_the_command_plans_for_the_measured_machine(
    machine: KeptMachine, again: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    assert main(["plan", str(tmp_path), *SEARCH, "--measure", "--best", "1", "--data-parallel-size", "2"]) == 0

    assert again == []
    assert "LlamaForCausalLM, 2 cpu devices on 1 host" in capsys.readouterr().out


def test_ranks_are_at_most_the_devices_of_a_host(
    again: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1,2")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)
    neighbours: list[int] = []

    def busy(count: int) -> AbstractContextManager[None]:
        neighbours.append(count)
        return nullcontext()

    monkeypatch.setattr(kept_machine, "busy", busy)

    for most in (None, 4, 1):
        measured_machine("cpu", most).factors("layers", lambda _: [[1.0, 1.0]])

    assert again == [64, 4, 2]
    assert neighbours == [63, 3, 1]


def test_ranks_that_would_share_cores_are_refused(
    again: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
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


def test_a_plan_names_the_measured_device(again: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    about = {"device": "NVIDIA A100", "cores": 1, "threads": 1}
    kept = KeptMachine("cuda", about, kept_machine._measured("cuda", 1, 1))
    monkeypatch.setattr("nxdpp.planning.planner.measured_machine", lambda *_: kept)
    monkeypatch.setattr(KeptMachine, "factors", lambda *_: [[1.0, 1.0]] * 4)

    def plan(device: Any) -> Plan:
        return nxdpp.plan(
            Stack(),
            devices=1,
            device_memory="1GB",
            global_batch=2,
            inputs=INPUTS,
            costs="measured",
            device=device,
            layouts=[Layout()],
        )

    assert plan("h100").device == "NVIDIA A100"
    with pytest.raises(ValueError, match="a DeviceSpeed is measured with costs='measured': name a device"):
        plan(DEVICES["a100"])


def test_figures_that_cannot_be_kept_serve(again: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))

    found = measured_machine("cpu", 2)

    assert found.figures["flops_4"] == 1e9
    assert re.search(r"figures of this machine are not kept \(.*\): set XDG_CACHE_HOME", found.note)


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


def names_of_messages(own: int, file: Path) -> list[str]:
    """Measure only messages; one rank more than pairs has no figures."""
    names: list[str] = []

    def messages(figures: RankFigures) -> dict[str, float]:
        found = figures._messages()
        names.extend(found)
        return found

    # Other work on this machine disturbs the link.
    with patch.multiple(rank, _REPEATS=3, _LONGER=0), patch.object(RankFigures, "all", messages):
        rank.main("cpu", 2, file)
    return names


def test_the_last_of_three_ranks_has_no_partner(tmp_path: Path) -> None:
    both = ["message_rate", "message_latency"]

    assert run_ranks(3, names_of_messages, tmp_path / "figures.json") == [both, both, []]

    assert list(json.loads((tmp_path / "figures.json").read_text())) == both


def test_devices_that_are_not_here_are_refused(cache: Path) -> None:
    for kind in ("xla",) if torch.cuda.is_available() else ("xla", "cuda"):
        with pytest.raises(ValueError, match=f"this machine has no {kind} device to measure"):
            measured_machine(kind)
    with pytest.raises(ValueError, match="peak and bandwidth are measured"):
        nxdpp.plan(nn.Linear(1, 1), devices=1, global_batch=1, inputs=INPUTS, costs="measured", peak=1e9, **CPU)

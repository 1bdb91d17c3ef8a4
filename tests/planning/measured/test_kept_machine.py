"""Figures of this machine: measured, kept, and refused where they are of another one."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import nxdpp
from nxdpp.__main__ import main
from nxdpp.planning.measured import kept_machine
from nxdpp.planning.measured.kept_machine import KeptMachine, measured_machine, place
from nxdpp.planning.plan import Plan
from tests.planning.test_plan_command import CONFIG, SEARCH
from tests.planning.test_planner import CPU, Stack

INPUTS = {"states": torch.zeros(3, 16)}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="module")
def machine(cache: Path) -> KeptMachine:
    return measured_machine("cpu")


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of ranks of measurements, which do not run."""
    made: list[int] = []

    def measured(kind: str, ranks: int, at_once: int) -> dict[str, float]:
        made.append(ranks)
        return {"flops_2": 1.0, "flops_4": 1.0, "bandwidth": 1.0, "operation": 1.0, "action": 1.0}

    monkeypatch.setattr(kept_machine, "_measured", measured)
    return made


def test_figures_are_of_operations_and_links(machine: KeptMachine) -> None:
    assert machine.figures.keys() == {"flops_2", "flops_4", "bandwidth", "operation", "action", "rate", "latency"}
    assert all(figure >= 0 for figure in machine.figures.values())
    assert 1e8 < machine.device.flops(torch.float32) < 1e13
    assert machine.link is not None
    assert machine.cores is not None


def test_kept_figures_are_not_measured_again(machine: KeptMachine, again: list[int]) -> None:
    found = measured_machine("cpu")

    assert (found.figures, found.about, found.note) == (machine.figures, machine.about, "")
    assert again == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"torch": "1.0"}, r"torch 1\.0, not"), ({"processor": "Z80"}, "processor Z80, not"), (None, "JSONDecodeError")],
)
def test_figures_of_another_machine_are_measured_again(
    machine: KeptMachine, again: list[int], change: dict[str, str] | None, reason: str
) -> None:
    file = place("cpu")
    before = file.read_text()
    content = json.loads(before)
    file.write_text("{" if change is None else json.dumps(content | {"about": content["about"] | change}))
    try:
        found = measured_machine("cpu")
        assert len(again) == 1
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
    assert json.loads(place("cpu").read_text())["layers"]


def test_the_command_plans_for_the_measured_machine(
    machine: KeptMachine, again: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    assert main(["plan", str(tmp_path), *SEARCH, "--measure", "--best", "1"]) == 0

    assert again == []
    assert "LlamaForCausalLM, 2 cpu devices on 1 host" in capsys.readouterr().out


def test_devices_that_are_not_here_are_refused(cache: Path) -> None:
    for kind in ("xla",) if torch.cuda.is_available() else ("xla", "cuda"):
        with pytest.raises(ValueError, match=f"this machine has no {kind} device to measure"):
            measured_machine(kind)
    with pytest.raises(ValueError, match="peak and bandwidth are measured"):
        nxdpp.plan(nn.Linear(1, 1), devices=1, global_batch=1, inputs=INPUTS, costs="measured", peak=1e9, **CPU)

"""The first hour on a machine, as the command: on the CPU over gloo, and on the fake accelerator."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu
from benchmarks.first_hour import faults
from benchmarks.first_hour.parts import PARTS, Part
from benchmarks.first_hour.place import ONE_CHIP, OWN, SHARED, Place
from benchmarks.first_hour.start import FAILED, HUNG, PASSED, Ended, Start
from nxdpp.schedules.families.registry import FAMILIES
from tests.benchmarks import failing_part
from tests.docs.pages import GUIDE, ROOT, commands
from tests.support import fake_device

REASON = fake_device.why_not()
on_fake = pytest.mark.skipif(REASON is not None, reason=str(REASON))
pytestmark = pytest.mark.timeout(900)

DRY, CUDA, EIGHT = Place("cpu", 0, True), Place("cuda", 1, False), Place("cuda", 8, False)


WAYS = pytest.mark.parametrize("parts", [["units", "sanitizer"], pytest.param([], marks=pytest.mark.sweep, id="all")])


def written_by(folder: Path, arguments: list[str], parts: list[str]) -> tuple[dict[str, Any], str]:
    """The JSON of the command for ``parts``, all by default, and its last line."""
    file = folder / "found.json"
    named = [word for name in parts for word in ("--part", name)]
    command = [sys.executable, *arguments, "--json", str(file), *named]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found: dict[str, Any] = json.loads(file.read_text())
    assert list(found["parts"]) == (parts or list(PARTS))
    return found, ended.stdout.splitlines()[-1]


@WAYS
def test_the_dry_command_of_the_guide_passes(parts: list[str], tmp_path: Path) -> None:
    (command,) = (line for _, line in commands(GUIDE / "gpus.md") if "gpu.py --dry" in line)
    python, *arguments = shlex.split(command, comments=True)
    assert python == "python"
    found, row = written_by(tmp_path, arguments, parts)
    cases = {name: [case["name"] for case in part["cases"]] for name, part in found["parts"].items()}
    for name, part in found["parts"].items():
        assert part["result"] == (gpu.ABSENT if name in ("several", "sanitizer") else PASSED)
        assert part["seconds"] <= part["limit"]
    if not parts:
        assert cases["schedules"] == [*FAMILIES, "1f1b, run_eval"]
        assert "torch.distributed.pipelining" in row
        assert cases["faults"] == faults.CASES
        assert found["parts"]["faults"]["cases"][0]["figures"][0]["named_by"] == [0, 1]
    header = (ROOT / "benchmarks/results/gpus.md").read_text().splitlines()
    assert f"| {' | '.join(gpu.COLUMNS)} |" in header
    assert row.count("|") == len(gpu.COLUMNS) + 1


@on_fake
@WAYS
def test_the_command_on_the_fake_accelerator(parts: list[str], tmp_path: Path) -> None:
    fake_device.built()
    found, _ = written_by(tmp_path, ["benchmarks/gpu.py", "--device", "fake"], parts)
    assert found["place"] == {"device": "fake", "visible": 1, "dry": True}
    for case in found["parts"].get("one", {}).get("cases", ()):
        # None is a case without steps.
        assert case["figures"][0].get("host_waits") in (None, {})


def test_a_case_that_fails_or_hangs_is_named_and_does_not_stop_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def part(*cases: str) -> Part:
        return Part("", 600, lambda place: [Start(failing_part.__name__, cases, 5.0)])

    parts = {"first": part("passes", "hangs", "differs", "raises"), "second": part("passes")}
    monkeypatch.setattr(gpu, "PARTS", parts)
    file = tmp_path / "found.json"
    with pytest.raises(SystemExit) as end:
        gpu.main(["--dry", "--json", str(file)])
    assert end.value.code == 1
    found = json.loads(file.read_text())["parts"]
    first = {case["name"]: case for case in found["first"]["cases"]}
    assert {name: case["result"] for name, case in first.items()} == {
        "passes": PASSED, "hangs": HUNG, "differs": FAILED, "raises": FAILED,
    }  # fmt: skip
    # The stack of a rank that hangs.
    assert "failing_part.py" in first["hangs"]["error"]
    assert first["differs"]["error"] == "rank 0: another number"
    assert "ValueError: the first error" in first["raises"]["error"]
    assert [found[name]["result"] for name in parts] == [FAILED, PASSED]
    assert "failed         raises  ValueError: the first error" in capsys.readouterr().out


def test_ranks_of_one_cuda_device_are_an_experiment() -> None:
    ways = {name: [(start.ranks, start.way) for start in PARTS[name].starts(CUDA)] for name in ("several", "faults")}
    assert ways == {"several": [(2, ONE_CHIP), (4, ONE_CHIP), (2, ONE_CHIP)], "faults": [(2, SHARED), (2, ONE_CHIP)]}
    assert [(start.ranks, start.way) for start in PARTS["several"].starts(EIGHT)] == [(8, OWN)]
    assert [start.ranks for start in PARTS["speed"].starts(Place("xpu", 6, False))] == [4]
    given = [PARTS["several"].starts(CUDA)[0].of_rank(rank, CUDA)["NCCL_HOSTID"] for rank in range(2)]
    assert given == ["rank0", "rank1"]
    assert "NCCL_HOSTID" not in PARTS["several"].starts(EIGHT)[0].of_rank(0, EIGHT)
    assert PARTS["sanitizer"].starts(CUDA)[0].environment == {"TORCH_CUDA_SANITIZER": "1"}
    assert PARTS["sanitizer"].starts(Place("xpu", 1, False)) == []


def test_the_parts_fit_into_an_hour() -> None:
    assert sum(part.limit for part in PARTS.values()) <= 3600


@pytest.mark.parametrize(
    ("case", "last", "at", "result"),
    [
        (faults.STUCK, "rank 0 stops because rank 1 does not reach step 4", 30.0, PASSED),
        (faults.STUCK, "rank 0 stops because rank 1 does not reach step 4", 131.0, FAILED),
        (faults.KILLED, "rank 0 stops because rank 1 was killed", 5.0, FAILED),
    ],
)
def test_who_is_named_for_a_fault_and_how_soon(case: str, last: str, at: float, result: str) -> None:
    """After a kill rank 1 says nothing."""
    outputs = [f"hang_timeout 10.0\n{last}\n", f"hang_timeout 10.0\nfault at 100.0\n{last.replace('rank 0', 'rank 1')}"]
    found = faults.judge(case, Ended([1, 1], outputs, [[], []], 100.0 + at, False))
    assert found["result"] == result
    assert found["figures"][0]["named_by"] == [0, 1]

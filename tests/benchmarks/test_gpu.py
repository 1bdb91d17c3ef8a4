"""The acceptance of a machine, over gloo on the CPU."""

import re
import shlex
import subprocess
import sys

import pytest

from benchmarks import gpu
from benchmarks.acceptance import cases
from benchmarks.acceptance.cases import Case, Job, Result, Size
from nxdpp.schedules.families.registry import FAMILIES
from tests.docs.pages import GUIDE, ROOT, commands
from tests.support.run_ranks import run_ranks

pytestmark = pytest.mark.one_python

JOB = Job(2, "gloo", "cpu")


def _run(rank: int) -> list[Result]:
    cases.SIZES["cpu"] = Size(8, 16, 4, 1)
    pytest.MonkeyPatch().setattr(cases, "FAMILIES", {"zb-v": FAMILIES["zb-v"]})
    return cases.run_rank(JOB, rank)


def test_a_case_is_exact_and_has_a_row() -> None:
    results = run_ranks(2, _run)
    rows = [gpu.row(of_case) for of_case in zip(*results, strict=True)]
    assert [row[0] for row in rows] == ["zb-v", "1f1b, run_eval"]
    assert [(row[1], row[2], row[-1]) for row in rows] == [("equal", "equal", "passed"), ("equal", "", "passed")]


def test_another_number_fails() -> None:
    result = Result(*Case("1f1b"), 0.0, 1e-6, 1.0, 1.0, 0.5, 0.0)
    assert gpu.row([result])[2:] == ["1.0e-06", "1000.0", "1000.0", "1.00", "50", "FAILED"]


def test_the_job_follows_the_devices() -> None:
    assert gpu.job_of("cpu", 0, None) == Job(4, "gloo", "cpu")
    assert gpu.job_of("cuda", 8, None) == Job(8, "nccl", "cuda")
    assert gpu.job_of("cuda", 16, None) == Job(8, "nccl", "cuda")
    assert gpu.job_of("cuda", 1, None) == Job(4, "gloo", "cuda:0")
    assert gpu.job_of("cuda", 2, 4) == Job(4, "gloo", "cuda:0")
    assert gpu.job_of("cuda", 8, 2) == Job(2, "nccl", "cuda")


def test_no_cuda_is_told_with_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--device", "cuda"])
    assert "--device cpu runs the same on the CPU" in capsys.readouterr().err


def test_the_command_of_the_guide_for_the_cpu_passes_every_case() -> None:
    """Processes that no torchrun starts, with a start for each case."""
    (command,) = (line for _, line in commands(GUIDE / "gpus.md") if "gpu.py --device cpu" in line)
    python, *arguments = shlex.split(command, comments=True)
    assert python == "python"
    ended = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    results = re.findall(r"^\| ([\w-]+)(, run_eval)? .* (passed|FAILED) +\|$", ended.stdout, re.M)
    assert results == [*((name, "", "passed") for name in FAMILIES), ("1f1b", ", run_eval", "passed")], ended.stdout

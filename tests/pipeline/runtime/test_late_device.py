"""Steps on devices that run late, with streams and the memory rules of CUDA: exact, and without a wait of the host."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

from tests.pipeline.runtime.late_pipeline import CHANGES

pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch takes no device type written in Python",
)


@pytest.fixture(scope="module")
def wrong() -> dict[str, list[str]]:
    """The schedules with wrong numbers, by case."""
    command = [sys.executable, "-m", "tests.pipeline.runtime.late_pipeline"]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_every_family_is_exact_and_waits_for_no_device(wrong: dict[str, list[str]]) -> None:
    assert wrong["nccl"] == []


def test_steps_over_gloo_are_exact(wrong: dict[str, list[str]]) -> None:
    assert wrong["gloo"] == []


def test_the_average_over_replicas_waits_for_no_device(wrong: dict[str, list[str]]) -> None:
    assert wrong["average"] == []
    assert wrong["average without a wait"] == ["alone", "first", "second"]


@pytest.mark.parametrize("change", CHANGES)
def test_a_missing_wait_gives_wrong_numbers(wrong: dict[str, list[str]], change: str) -> None:
    assert [names for case, names in wrong.items() if change in case] == [["gpipe"]]

"""The main job with ``--device xla``, at tiny size: the CPU's losses and weights, a resumed run, a sample."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

import tests.examples.conftest  # noqa: F401  # the import path of the example
from tests.examples.test_train import STEPS, _saved, _tiny, _train
from tests.support.run_ranks import run_ranks
from tests.support.xla_ranks import run_xla_ranks

RANKS = 2

# The ranks of the first test compile all graphs.
pytestmark = pytest.mark.timeout(500)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, str]]]:
    """On each device a job that saves after step 3, and one that resumes there: their folder and their output."""
    found = {}
    for device, run in (("cpu", run_ranks), ("xla", run_xla_ranks)):
        folder = tmp_path_factory.mktemp(device)
        flags = ["--device", device, "--checkpoint-every", "3"]
        (whole,) = run(RANKS, _train, _tiny(folder / "whole", *flags), timeout=400)[0]
        shutil.copytree(folder / "whole/checkpoints/step_3", folder / "resumed/checkpoints/step_3")
        (folder / "resumed/checkpoints/latest").write_text("step_3")
        (resumed,) = run(RANKS, _train, _tiny(folder / "resumed", *flags, "--resume"), timeout=400)[0]
        found[device] = (folder, {"whole": whole, "resumed": resumed})
    return found


def _losses(folder: Path) -> torch.Tensor:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    return torch.tensor([record["loss"] for record in records])


@pytest.mark.parametrize("job", ["whole", "resumed"])
def test_losses_and_weights_are_those_of_the_cpu(folders: dict[str, tuple[Path, dict[str, str]]], job: str) -> None:
    (cpu, _), (xla, printed) = folders["cpu"], folders["xla"]
    torch.testing.assert_close(_losses(xla / job), _losses(cpu / job), rtol=0, atol=1e-5)
    torch.testing.assert_close(_saved(xla / job), _saved(cpu / job), rtol=0, atol=1e-4)
    held_out = [re.findall(r"held-out loss .*: ([\d.]+)", folders[device][1][job]) for device in ("cpu", "xla")]
    assert held_out[0] == held_out[1]
    assert "a sample from" in printed[job]


def test_a_resumed_job_goes_on_from_step_3(folders: dict[str, tuple[Path, dict[str, str]]]) -> None:
    folder, printed = folders["xla"]
    assert "held-out loss after step 3:" in printed["resumed"]
    torch.testing.assert_close(_losses(folder / "resumed"), _losses(folder / "whole"), rtol=0, atol=1e-6)

"""The main job with ``--device xla``, at tiny size: the CPU's losses and weights, a resumed run, bfloat16, a sample."""

import json
import re
from pathlib import Path

import pytest
import torch

import tests.examples.conftest  # noqa: F401  # the import path of the example
from tests.examples.test_train import FLAGS, STEPS, _saved, _train
from tests.examples.tiny import TINY_LLAMA
from tests.support.run_ranks import run_ranks
from tests.support.xla_ranks import run_xla_ranks

RANKS = 2

# The ranks of the first test compile all graphs.
pytestmark = pytest.mark.timeout(500)


def _jobs(rank: int, folder: Path, device: str) -> dict[str, str]:
    """The output of each job: one that saves after step 3, one that goes on from there, one in bfloat16."""
    flags = [*FLAGS, "--config", str(folder / "tiny.json"), "--device", device, "--output"]
    saved = folder / "whole" / "checkpoints" / "step_3"
    return {
        "whole": _train(rank, [*flags, str(folder / "whole"), "--checkpoint-every", "3"]),
        "resumed": _train(rank, [*flags, str(folder / "resumed"), "--resume", str(saved)]),
        "bfloat16": _train(rank, [*flags, str(folder / "bfloat16"), "--dtype", "bfloat16"]),
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, str]]]:
    """Folder and output of rank 0 of the jobs on each device."""
    found = {}
    for device, run in (("cpu", run_ranks), ("xla", run_xla_ranks)):
        folder = tmp_path_factory.mktemp(device)
        (folder / "tiny.json").write_text(json.dumps(TINY_LLAMA))
        found[device] = (folder, run(RANKS, _jobs, folder, device, timeout=400)[0])
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
    assert "a sample from the checkpoint" in printed[job]


def test_a_resumed_job_goes_on_from_step_3(folders: dict[str, tuple[Path, dict[str, str]]]) -> None:
    folder, printed = folders["xla"]
    assert "held-out loss after step 3:" in printed["resumed"]
    torch.testing.assert_close(_losses(folder / "resumed"), _losses(folder / "whole"), rtol=0, atol=1e-6)


def test_bfloat16_is_autocast(folders: dict[str, tuple[Path, dict[str, str]]]) -> None:
    (cpu, _), (xla, _) = folders["cpu"], folders["xla"]
    losses, wide = _losses(xla / "bfloat16"), _losses(xla / "whole")
    assert not torch.equal(losses, wide)
    torch.testing.assert_close(losses, _losses(cpu / "bfloat16"), rtol=0, atol=2e-2)
    assert {tensor.dtype for tensor in _saved(xla / "bfloat16").values()} == {torch.float32}

"""The main job goes on from a checkpoint: the same losses, weights and metrics as without the stop."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.examples.tiny import TINY_LLAMA
from tests.support.run_ranks import run_ranks

TRAIN = Path(__file__).parents[2] / "examples" / "llama" / "train.py"
STEPS = 6
FLAGS = f"--steps {STEPS} --batch-size 8 --seq-length 16 --num-microbatches 2 --checkpoint-every 2".split()
STAGES = ["--pipeline-parallel-size", "2"]
REPLICAS = ["--pipeline-parallel-size", "1", "--zero1"]


def _arguments(folder: Path, *flags: str) -> list[str]:
    config = folder.with_suffix(".json")
    config.write_text(json.dumps({**TINY_LLAMA, "attention_dropout": 0.1}))
    text = folder.with_suffix(".txt")
    text.write_bytes(bytes(range(32, 120)) * 30)
    return [*FLAGS, "--config", str(config), "--data", str(text), "--output", str(folder), *flags]


def _train(rank: int, *jobs: list[str]) -> None:
    import train

    for arguments in jobs:
        train.main(arguments)


def _train_until(rank: int, last: int, arguments: list[str]) -> None:
    """Die after the metrics of step ``last``, before its checkpoint."""
    import train
    from report import TrainingReport

    step_done = TrainingReport.step_done

    def dying(self: Any, step: int, *values: Any) -> None:
        step_done(self, step, *values)
        if step == last and rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingReport, "step_done", dying)
        train.main(arguments)


def _losses(folder: Path) -> list[float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    return [record["loss"] for record in records]


def _saved(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("layout", [STAGES, REPLICAS], ids=["stages", "replicas"])
def test_a_killed_job_goes_on_exactly(layout: list[str], tmp_path: Path) -> None:
    """Both have dropout. ``auto`` starts anew without a checkpoint."""
    expected, folder = tmp_path / "expected", tmp_path / "run"
    run_ranks(2, _train, _arguments(expected, *layout))
    with pytest.raises(AssertionError):
        run_ranks(2, _train_until, 5, _arguments(folder, *layout, "--resume"))
    assert len((folder / "metrics.unfinished.jsonl").read_text().splitlines()) == 5
    run_ranks(2, _train, _arguments(folder, *layout, "--resume", "auto"))

    assert _losses(folder) == _losses(expected)
    weights, own = _saved(expected), _saved(folder)
    assert [name for name in weights if not torch.equal(own[name], weights[name])] == []
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == [".lock", "latest", "step_2", "step_4", "step_6"]


def test_a_resume_from_an_older_checkpoint_gives_the_later_ones_up(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_ranks(1, _train, _arguments(folder))
    expected = _losses(folder)
    older = str(folder / "checkpoints" / "step_2")
    with pytest.raises(AssertionError):
        run_ranks(1, _train_until, 3, _arguments(folder, "--resume", older))
    assert (folder / "checkpoints" / "latest").read_text() == "step_2"
    run_ranks(1, _train, _arguments(folder, "--resume", "auto"))
    assert _losses(folder) == expected

"""The main job goes on from a checkpoint: the same losses, weights and metrics as without the stop."""

import errno
import json
import os
import random
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from nxdpp import parallel_state
from nxdpp.checkpoint.files.checksummed_writer import write_checksummed
from nxdpp.watching.metrics_reader import RunMetrics
from tests.examples.tiny import TINY_LLAMA, run_main_job
from tests.support.run_ranks import run_ranks

pytestmark = pytest.mark.one_python

TRAIN = Path(__file__).parents[2] / "examples" / "llama" / "train.py"
STEPS = 6
FLAGS = f"--steps {STEPS} --batch-size 8 --seq-length 16 --num-microbatches 2 --checkpoint-every 2".split()
STAGES = ["--pipeline-parallel-size", "2"]
REPLICAS = ["--pipeline-parallel-size", "1", "--zero1"]
SHARDS = ["--pipeline-parallel-size", "1", "--shard"]
TENSOR = ["--pipeline-parallel-size", "1", "--tensor-parallel-size", "2", "--sequence-parallel"]


def _arguments(folder: Path, *flags: str, dropout: float = 0.1, **fields: Any) -> list[str]:
    config = folder.with_suffix(".json")
    config.write_text(json.dumps({**TINY_LLAMA, "attention_dropout": dropout, **fields}))
    text = folder.with_suffix(".txt")
    text.write_bytes(bytes(range(32, 120)) * 30)
    return [*FLAGS, "--config", str(config), "--data", str(text), "--output", str(folder), *flags]


def _train(rank: int, *jobs: list[str]) -> None:
    for arguments in jobs:
        run_main_job(arguments)


def _train_until(rank: int, last: int, arguments: list[str]) -> None:
    """Die after the metrics of step ``last``, before its checkpoint."""
    from report import TrainingReport

    step_done = TrainingReport.step_done

    def dying(self: Any, step: int, *values: Any) -> None:
        step_done(self, step, *values)
        if step == last and rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingReport, "step_done", dying)
        run_main_job(arguments)


def _losses(folder: Path) -> list[float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    return [record["loss"] for record in records]


def _saved(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def _train_with_full_disk(rank: int, last_files: list[int], *jobs: list[str]) -> None:
    """Train ``jobs``; on rank 1 the files after the first ones, a number for each job, cannot be written."""
    from nxdpp.checkpoint.distributed import save

    for last, arguments in zip(last_files, jobs, strict=True):
        written = 0

        def full(path: Path, tensors: Any, last: int = last) -> Any:
            nonlocal written
            written += 1
            if written == last + 1:
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            return write_checksummed(path, tensors)

        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(save, "write_checksummed", full)
            _train(rank, arguments)


def _train_with_rates(rank: int, arguments: list[str]) -> list[float]:
    """Learning rate of each step."""
    rates: list[float] = []
    step = torch.optim.AdamW.step

    def stepped(self: torch.optim.AdamW, *values: Any) -> Any:
        rates.append(self.param_groups[0]["lr"])
        return step(self, *values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", stepped)
        _train(rank, arguments)
    return rates


def _checkpoints(folder: Path) -> list[str]:
    """The files of a folder of checkpoints but hidden ones."""
    return sorted(path.name for path in (folder / "checkpoints").iterdir() if path.name[0] != ".")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training of one process, without dropout and without a stop."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run_ranks(1, _train, _arguments(folder, dropout=0.0))
    return folder


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(STAGES, id="stages", marks=pytest.mark.sweep),
        pytest.param([*REPLICAS, "--checkpoint-async"], id="replicas"),
        pytest.param(SHARDS, id="shards", marks=pytest.mark.sweep),
    ],
)
def test_a_killed_job_goes_on_exactly(layout: list[str], tmp_path: Path) -> None:
    """Both have dropout. ``auto`` starts anew without a checkpoint."""
    expected, folder = tmp_path / "expected", tmp_path / "run"
    run_ranks(2, _train, _arguments(expected, *layout))
    with pytest.raises(AssertionError):
        run_ranks(2, _train_until, 5, _arguments(folder, *layout, "--resume"))
    assert RunMetrics(folder).ranks[0].last["step"] == 5
    run_ranks(2, _train, _arguments(folder, *layout, "--resume", "auto"))
    assert dict(RunMetrics(folder).curves()["loss"]) == dict(enumerate(_losses(folder), 1))

    assert _losses(folder) == _losses(expected)
    weights, own = _saved(expected), _saved(folder)
    assert [name for name in weights if not torch.equal(own[name], weights[name])] == []
    assert _checkpoints(folder) == ["latest", "step_2", "step_4", "step_6"]


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


def test_other_ranks_go_on_in_another_directory(whole: Path, tmp_path: Path) -> None:
    """Stages, replicas with ZeRO-1 or shards, tensor ranks; another interval, another number of kept checkpoints."""
    start = ["--resume", str(whole / "checkpoints" / "step_2"), "--checkpoint-every", "1", "--checkpoint-keep", "2"]
    runs = {
        tmp_path / name: flags for name, flags in {"pp": STAGES, "dp": REPLICAS, "tp": TENSOR, "shards": SHARDS}.items()
    }
    run_ranks(2, _train, *[_arguments(folder, *start, *flags, dropout=0.0) for folder, flags in runs.items()])
    lines = (whole / "metrics.jsonl").read_text().splitlines()
    expected = _saved(whole)
    for folder in runs:
        assert _losses(folder) == pytest.approx(_losses(whole), rel=1e-6)
        assert (folder / "metrics.jsonl").read_text().splitlines()[:2] == lines[:2]
        assert _checkpoints(folder) == ["latest", "step_5", "step_6"]
        own = _saved(folder)
        for name, weight in expected.items():
            assert (own[name] - weight).norm() <= 1e-5 * weight.norm(), (folder.name, name)


def test_a_run_that_ended_goes_on(whole: Path, tmp_path: Path) -> None:
    """Again to its end, and with more steps, whose schedule is the longer one at once."""
    before = (whole / "metrics.jsonl").read_text(), _saved(whole)
    run_ranks(1, _train, _arguments(whole, "--resume", dropout=0.0))
    assert (whole / "metrics.jsonl").read_text() == before[0]
    assert [name for name, weight in _saved(whole).items() if not torch.equal(weight, before[1][name])] == []

    start = ["--resume", str(whole / "checkpoints" / "step_6"), "--steps", "9", "--checkpoint-every", "5"]
    (longer,) = run_ranks(1, _train_with_rates, _arguments(tmp_path / "longer", *start, dropout=0.0))
    (anew,) = run_ranks(1, _train_with_rates, _arguments(tmp_path / "anew", "--steps", "9", dropout=0.0))
    assert longer == anew[6:]
    records = [json.loads(line) for line in (tmp_path / "longer" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 10))
    # The last step is saved too.
    assert _checkpoints(tmp_path / "longer") == ["latest", "step_9"]


def test_a_resume_reads_no_pretrained_weights(tmp_path: Path) -> None:
    """The folder may have lost them: those of the checkpoint count."""
    torch.manual_seed(3)
    source, folder = tmp_path / "pretrained", tmp_path / "run"
    LlamaForCausalLM(LlamaConfig(**TINY_LLAMA)).save_pretrained(source)
    arguments = _arguments(folder)
    at = arguments.index("--config")
    arguments[at : at + 2] = ["--pretrained", str(source)]
    run_ranks(1, _train, arguments)
    expected = _losses(folder)
    (source / "model.safetensors").unlink()
    for name in ("step_4", "step_6"):
        shutil.rmtree(folder / "checkpoints" / name)
    run_ranks(1, _train, [*arguments, "--resume"])
    assert _losses(folder) == expected


@pytest.mark.parametrize(
    ("flags", "fields", "said"),
    [
        (["--seed", "1"], {}, "was made with --seed 0, not 1, and the training would not go on exactly"),
        (["--seq-length", "8"], {}, "--seq-length 16, not 8"),
        (["--batch-size", "4", "--learning-rate", "0.5"], {}, "--batch-size 8, not 4, --learning-rate 0.0015, not 0.5"),
        (["--data", __file__], {}, "other text in --data"),
        ([], {"hidden_size": 48}, "a model with hidden_size 32, not 48"),
        ([], {"num_hidden_layers": 3}, "a model with num_hidden_layers 2, not 3"),
        (["--steps", "5"], {}, "the checkpoint is of step 6, beyond --steps 5: give more steps"),
    ],
)
@pytest.mark.parametrize("source", ["auto", "path"])
def test_other_settings_are_refused_before_anything_is_loaded(
    flags: list[str],
    fields: dict[str, Any],
    said: str,
    source: str,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import train

    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    resume = ["--checkpoint-dir", str(whole / "checkpoints"), "--resume"]
    if source == "path":
        resume = ["--resume", str(whole / "checkpoints" / "step_6")]
    with pytest.raises(SystemExit) as ended:
        train.main(_arguments(tmp_path / "run", *resume, *flags, dropout=0.0, **fields))
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("train.py: the checkpoint")
    assert printed.count("\n") == 1
    assert said in printed
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == before


@pytest.mark.parametrize("is_document", [True, False], ids=["document", "values"])
def test_auto_takes_the_next_older_checkpoint_for_a_damaged_one(is_document: bool, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole / "checkpoints", folder / "checkpoints")
    newest = folder / "checkpoints" / "step_6"
    (file,) = newest.glob("checkpoint.json" if is_document else "*.safetensors")
    content = bytearray(file.read_bytes())
    content[-20] ^= 1
    file.write_bytes(content)
    run_ranks(1, _train, _arguments(folder, "--resume", "auto", dropout=0.0))
    assert _losses(folder) == _losses(whole)
    assert _checkpoints(folder) == ["latest", "step_2", "step_4", "step_6"]


def test_a_full_disk_does_not_end_the_training_if_so_asked(tmp_path: Path) -> None:
    """A save in the step, and one in the background: the save of step 4 fails on rank 1."""
    expected, runs = tmp_path / "expected", [tmp_path / "now", tmp_path / "background"]
    go_on = ["--checkpoint-errors", "go-on", *STAGES]
    jobs = [_arguments(expected, *STAGES), _arguments(runs[0], *go_on)]
    run_ranks(2, _train_with_full_disk, [9, 1, 1], *jobs, _arguments(runs[1], *go_on, "--checkpoint-async", "skip"))
    for folder in runs:
        assert _losses(folder) == _losses(expected)
        own = _saved(folder)
        assert [name for name, weight in _saved(expected).items() if not torch.equal(weight, own[name])] == []
        assert not (folder / "checkpoints" / "step_4" / "checkpoint.json").exists()
        assert (folder / "checkpoints" / "step_2" / "checkpoint.json").exists()
    with pytest.raises(AssertionError, match="No space left on device"):
        run_ranks(2, _train_with_full_disk, [1], _arguments(tmp_path / "end", *STAGES, "--checkpoint-async"))


@pytest.mark.parametrize("steps", [STEPS, 40])
def test_each_batch_is_that_of_the_training_without_a_stop(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any number of replicas, after any step, and with more steps than the first run had."""
    from corpus import Corpus
    from training import training_batches

    text = random.Random(0).randbytes(1000)

    def batches(replicas: int, of_steps: int, done: int) -> list[list[list[int]]]:
        """The sequences of each step on all replicas, sorted."""
        settings: Any = SimpleNamespace(
            corpus=Corpus(text, text, (), ()), steps=of_steps, batch_size=12, seq_length=8, seed=3
        )
        monkeypatch.setattr(parallel_state, "get_data_parallel_size", lambda: replicas)
        found = []
        for replica in range(replicas):
            monkeypatch.setattr(parallel_state, "get_data_parallel_rank", lambda replica=replica: replica)
            found.append(list(training_batches(settings, done)))
        return [sorted(torch.cat(parts).tolist()) for parts in zip(*found, strict=True)]

    whole = batches(1, steps, 0)
    assert [len(batch) for batch in whole] == [12] * steps
    for replicas in (1, 2, 3, 4):
        for done in (0, 1, 5, STEPS):
            assert batches(replicas, steps, done) == whole[done:]
    assert batches(1, STEPS, 0) == whole[:STEPS]

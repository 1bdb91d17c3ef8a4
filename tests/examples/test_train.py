"""The main job at tiny size, from start to end: equal training on any number of processes, and its files."""

import contextlib
import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from nxdpp.watching.metrics_file import MetricsFile
from nxdpp.watching.metrics_reader import RunMetrics
from tests.examples.tiny import TINY_LLAMA, files_of, run_main_job
from tests.support.run_ranks import run_ranks

TRAIN = Path(__file__).parents[2] / "examples" / "llama" / "train.py"
STEPS, BATCH, LENGTH, MICROBATCHES, RATE, SEED = 6, 8, 32, 2, 3e-3, 5
FLAGS = (
    f"--steps {STEPS} --batch-size {BATCH} --seq-length {LENGTH} --num-microbatches {MICROBATCHES} "
    f"--learning-rate {RATE} --seed {SEED}"
).split()


def _train(rank: int, *jobs: list[str], last: int | None = None) -> list[str]:
    """Run the jobs one after the other, and die in the step after ``last``; return the output of each."""
    write = MetricsFile.write

    def dying(self: MetricsFile, *values: Any) -> None:
        write(self, *values)
        if self._step == last and rank == 0:
            os._exit(9)

    printed = []
    for arguments in jobs:
        with contextlib.redirect_stdout(io.StringIO()) as written, pytest.MonkeyPatch.context() as patch:
            patch.setattr(MetricsFile, "write", dying)
            run_main_job([*FLAGS, *arguments])
        printed.append(written.getvalue())
    return printed


def _train_until(rank: int, last: int, arguments: list[str]) -> None:
    _train(rank, arguments, last=last)


def _saved(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the trained model in ``folder``."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def _losses(folder: Path) -> list[float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    losses = [record["loss"] for record in records]
    assert dict(RunMetrics(folder).curves()["loss"]) == dict(enumerate(losses, 1))
    return losses


def _tiny(folder: Path, *flags: str) -> list[str]:
    """Flags of a run that trains on the standard library."""
    config = folder.with_suffix(".json")
    config.write_text(json.dumps(TINY_LLAMA))
    return ["--config", str(config), "--output", str(folder), *flags]


@pytest.fixture(scope="module")
def unwrapped() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of the same training without nxdpp, which accumulates microbatches."""
    from train import learning_rate_factor, read_texts

    torch.manual_seed(SEED)
    model = LlamaForCausalLM(LlamaConfig(**TINY_LLAMA))
    text, _ = read_texts(None)
    drawn = torch.Generator().manual_seed(SEED)
    starts = torch.randint(len(text) - LENGTH + 1, (STEPS, BATCH), generator=drawn)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99))
    losses = []
    for step, of_step in enumerate(starts):
        batch = text[of_step[:, None] + torch.arange(LENGTH)].long()
        optimizer.param_groups[0]["lr"] = RATE * learning_rate_factor(step, STEPS)
        parts = [model(input_ids=ids, labels=ids).loss for ids in batch.chunk(MICROBATCHES)]
        for part in parts:
            (part / MICROBATCHES).backward()
        norms = [parameter.grad.norm().double() for parameter in model.parameters() if parameter.grad is not None]
        # Added up in float64, the norm is the same number in any order.
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, torch.stack(norms).norm().float())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(torch.stack(parts).mean().item())
    return losses, dict(model.state_dict())


def test_a_pipeline_trains_exactly_like_the_unwrapped_model(
    tmp_path: Path, unwrapped: tuple[list[float], dict[str, torch.Tensor]]
) -> None:
    losses, weights = unwrapped
    folder = tmp_path / "run"
    printed = run_ranks(2, _train, _tiny(folder))
    model = LlamaForCausalLM.from_pretrained(folder)
    saved = model.state_dict()

    assert _losses(folder) == pytest.approx(losses, rel=1e-6)
    assert losses[-1] < losses[0]
    assert saved.keys() == weights.keys()
    assert [name for name in weights if not torch.equal(saved[name], weights[name])] == []
    for rank, (own,) in enumerate(printed):
        assert f"rank {rank}: model.layers.{rank}\n" in own
        assert rank == 0 or own.count("\n") == 1
    before, after = (float(number) for number in re.findall(r"held-out loss after step \d: ([0-9.]+)", printed[0][0]))
    assert after < before == pytest.approx(5.55, abs=0.1)
    assert after == pytest.approx(_held_out_loss(model), abs=1e-3)
    assert f"\na sample from {folder}:\n" in printed[0][0]


def _held_out_loss(model: LlamaForCausalLM) -> float:
    """Loss on the evaluated sequences of held-out text."""
    from train import read_texts

    _, text = read_texts(None)
    starts = torch.linspace(0, len(text) - LENGTH, 128, dtype=torch.float64).long()
    ids = text[starts[:, None] + torch.arange(LENGTH)].long()
    with torch.no_grad():
        loss: float = model.eval()(input_ids=ids, labels=ids).loss.item()
    return loss


def test_replicas_train_like_one_process(
    tmp_path: Path, unwrapped: tuple[list[float], dict[str, torch.Tensor]]
) -> None:
    jobs = {flag: _tiny(tmp_path / flag, "--pipeline-parallel-size", "1", flag) for flag in ("--zero1", "--shard")}
    run_ranks(2, _train, *jobs.values())
    _check(tmp_path, [*jobs], unwrapped)


def _check(folder: Path, runs: list[str], unwrapped: tuple[list[float], dict[str, torch.Tensor]]) -> None:
    losses, weights = unwrapped
    for name in runs:
        assert _losses(folder / name) == pytest.approx(losses, rel=1e-5), name
        torch.testing.assert_close(_saved(folder / name), weights, rtol=1e-4, atol=1e-5)


def test_tensor_parallel_ranks_train_like_one_process(
    tmp_path: Path, unwrapped: tuple[list[float], dict[str, torch.Tensor]]
) -> None:
    run_ranks(4, _train, _tiny(tmp_path / "run", "--tensor-parallel-size", "2", "--sequence-parallel"))
    _check(tmp_path, ["run"], unwrapped)


def test_replicas_that_share_experts_train_like_one_process(tmp_path: Path) -> None:
    shared = ("--experts", "4", "--expert-parallel-size", "2")
    jobs = {flag: _tiny(tmp_path / flag, *shared, flag) for flag in ("--zero1", "--shard")}
    run_ranks(1, _train, _tiny(tmp_path / "one", "--experts", "4"))
    run_ranks(4, _train, _tiny(tmp_path / "stages", *shared))
    run_ranks(2, _train, *jobs.values())
    for name in ("stages", *jobs):
        assert _losses(tmp_path / name) == pytest.approx(_losses(tmp_path / "one"), rel=1e-5), name
        torch.testing.assert_close(_saved(tmp_path / name), _saved(tmp_path / "one"), rtol=1e-4, atol=1e-5)


def test_another_schedule_has_the_losses_of_the_default_one(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    jobs: dict[str, list[str]] = {
        "default": [],
        "interleaved": ["--virtual-pipeline-size", "2", "--trace", str(trace)],
    }
    arguments = [[*files_of(tmp_path / name, num_hidden_layers=4), *flags] for name, flags in jobs.items()]
    printed = run_ranks(2, _train, *arguments)
    for name in jobs:
        assert _losses(tmp_path / name) == _losses(tmp_path / "default"), name
    assert "rank 0: model.layers.0, model.layers.2\n" in printed[0][1]
    assert any(each["ph"] == "X" for each in json.loads(trace.read_text()))


def test_a_killed_job_resumes_exactly_and_refuses_other_flags(tmp_path: Path) -> None:
    """Both have dropout. ``--resume`` starts without a checkpoint."""
    expected, folder = tmp_path / "expected", tmp_path / "run"
    saves = ["--checkpoint-every", "2", "--pipeline-parallel-size", "1", "--zero1"]
    own = [*files_of(folder, attention_dropout=0.1), *saves]
    run_ranks(2, _train, [*files_of(expected, attention_dropout=0.1), *saves])
    with pytest.raises(AssertionError):
        run_ranks(2, _train_until, 5, [*own, "--resume"])
    assert RunMetrics(folder).ranks[0].last["step"] == 5
    for flags in ([], ["--resume", "--seed", "1"]):
        with pytest.raises(AssertionError, match="has a training: give --resume and the same"):
            run_ranks(2, _train, [*own, *flags])
    run_ranks(2, _train, [*own, "--resume"])
    assert _losses(folder) == _losses(expected)
    weights, saved = _saved(expected), _saved(folder)
    assert [name for name in weights if not torch.equal(saved[name], weights[name])] == []
    assert sorted(each.name for each in (folder / "checkpoints").glob("step_*")) == ["step_2", "step_4", "step_6"]


@pytest.mark.parametrize(("count", "held_out"), [(2, {2}), (41, {20, 40})])
def test_whole_files_are_held_out(tmp_path: Path, count: int, held_out: set[int]) -> None:
    from train import read_texts

    files = [tmp_path / f"{number:02}.txt" for number in range(1, count + 1)]
    for number, file in enumerate(files, 1):
        file.write_bytes(bytes([number]) * number)
    trained, other = (set(text.tolist()) - {0} for text in read_texts(files))
    assert other == held_out
    assert trained == set(range(1, count + 1)) - held_out


def test_one_file_leaves_nothing_to_train_on(tmp_path: Path) -> None:
    from train import read_texts

    (tmp_path / "empty.txt").touch()
    (tmp_path / "one.txt").write_text("text")
    with pytest.raises(ValueError, match="--data needs two or more files with text, and has 1: the last one is held"):
        read_texts([tmp_path / "empty.txt", tmp_path / "one.txt"])


def test_a_program_for_one_sitting() -> None:
    assert [file.name for file in TRAIN.parent.glob("*.py")] == ["train.py"]
    assert len(TRAIN.read_text().splitlines()) <= 200

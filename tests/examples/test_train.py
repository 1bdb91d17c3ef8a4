"""The main job at tiny size, from start to end: equal training on any number of processes, and its files."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from tests.examples.tiny import HELD_OUT, TINY_LLAMA, run_main_job
from tests.support.fake_xla import FakeXla
from tests.support.run_ranks import run_ranks

TRAIN = Path(__file__).parents[2] / "examples" / "llama" / "train.py"
STEPS, BATCH, LENGTH, MICROBATCHES, RATE, SEED = 6, 8, 32, 2, 3e-3, 5
FLAGS = (
    f"--steps {STEPS} --batch-size {BATCH} --seq-length {LENGTH} --num-microbatches {MICROBATCHES} "
    f"--learning-rate {RATE} --seed {SEED}"
).split()


def _train(rank: int, arguments: list[str]) -> str:
    """Run one rank; return its output."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run_main_job(arguments)
    return printed.getvalue()


def _job(folder: Path, world_size: int, *flags: str, **fields: Any) -> list[str]:
    """Run the job over ``world_size`` processes into ``folder``; return the output of each rank."""
    folder.mkdir(exist_ok=True)
    config = folder.with_suffix(".json")
    config.write_text(json.dumps({**TINY_LLAMA, **fields}))
    arguments = [*FLAGS, "--config", str(config), "--output", str(folder), *flags]
    printed: list[str] = run_ranks(world_size, _train, arguments)
    return printed


def _saved(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the checkpoint in ``folder``."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def _losses(folder: Path) -> list[float]:
    watched = [json.loads(line) for line in (folder / "metrics" / "rank0000.jsonl").read_text().splitlines()]
    assert "versions" in watched[0]
    assert any(record.get("held_out_loss", 0) > 0 and record["step"] == STEPS for record in watched)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert all(record.keys() == {"step", "loss", "tokens_per_second"} for record in records)
    assert all(record["tokens_per_second"] > 0 for record in records)
    return [record["loss"] for record in records]


@pytest.fixture(scope="module")
def unwrapped() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of the training from scratch without nxdpp."""
    torch.manual_seed(SEED)
    return _unwrapped_training(LlamaForCausalLM(LlamaConfig(**TINY_LLAMA)))


@pytest.fixture(scope="module")
def of_one_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Folder and output of the job on one process."""
    folder = tmp_path_factory.mktemp("job") / "run"
    return folder, _job(folder, 1, "--compare")


def _unwrapped_training(model: LlamaForCausalLM) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of the same training without nxdpp: ``model`` accumulates microbatches."""
    from corpus import read_corpus, standard_library_files
    from learning_rate import learning_rate_factor
    from windows import RandomWindows

    text = read_corpus(standard_library_files()).train
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99))
    losses = []
    windows = RandomWindows(text, STEPS * BATCH, LENGTH, SEED)
    for step, batch in enumerate(DataLoader(windows, BATCH)):
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


def _loaded(folder: Path) -> LlamaForCausalLM:
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder)
    model.train()
    return model


def _held_out_loss(folder: Path) -> float:
    """Loss of the checkpoint in ``folder`` on the evaluated sequences of held-out text."""
    from corpus import read_corpus, standard_library_files
    from windows import held_out_batches

    model = LlamaForCausalLM.from_pretrained(folder).eval()
    (ids,) = held_out_batches(read_corpus(standard_library_files()).held_out, HELD_OUT, LENGTH, 1)
    with torch.no_grad():
        loss: float = model(input_ids=ids, labels=ids).loss.item()
    return loss


@pytest.mark.parametrize("stages", [1, 2])
def test_pipeline_trains_exactly_like_the_unwrapped_model(
    tmp_path: Path,
    stages: int,
    unwrapped: tuple[list[float], dict[str, torch.Tensor]],
    of_one_process: tuple[Path, list[str]],
) -> None:
    losses, weights = unwrapped
    folder, printed = of_one_process if stages == 1 else (tmp_path / "run", _job(tmp_path / "run", stages))
    saved = LlamaForCausalLM.from_pretrained(folder).state_dict()

    assert _losses(folder) == pytest.approx(losses, rel=1e-6)
    assert losses[-1] < losses[0]
    assert saved.keys() == weights.keys()
    assert [name for name in weights if not torch.equal(saved[name], weights[name])] == []
    assert all(text == "" for text in printed[1:])
    for rank, layers in enumerate(["model.layers.0-1"] if stages == 1 else ["model.layers.0 ", "model.layers.1 "]):
        assert re.search(rf"{rank} │ +{rank} │ +0 │ {layers}", printed[0])
    before, after = (float(number) for number in re.findall(r"held-out loss .* training: ([0-9.]+)", printed[0]))
    assert after == pytest.approx(_held_out_loss(folder), abs=1e-3)
    watched = [json.loads(line) for line in (folder / "metrics" / "rank0000.jsonl").read_text().splitlines()]
    assert [each["held_out_loss"] for each in watched if "held_out_loss" in each][-1] == pytest.approx(after, abs=1e-3)
    assert after < before == pytest.approx(5.55, abs=0.1)
    sample = printed[0].partition("a sample from the checkpoint")[2]
    assert re.search(r"\nstep +[0-9.,]+ ms  median.*\nrun_train +[0-9.,]+ ms  ", sample)
    assert ("\nideal  " in sample, "\none process  " in sample) == (stages == 2, stages == 1)
    assert re.search(r"\nprompt, from held-out text:\n.+\ncontinuation:\n.", sample, re.DOTALL)


@pytest.mark.parametrize("flags", [[], ["--zero1"], ["--shard", "microbatch"]])
def test_replicas_train_like_one_process(
    tmp_path: Path, flags: list[str], unwrapped: tuple[list[float], dict[str, torch.Tensor]]
) -> None:
    losses, weights = unwrapped
    _job(tmp_path / "run", 2, "--pipeline-parallel-size", "1", *flags)
    saved = _saved(tmp_path / "run")

    assert _losses(tmp_path / "run") == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(saved, weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("flags", [pytest.param([], marks=pytest.mark.sweep), ["--sequence-parallel"]])
def test_tensor_parallel_ranks_train_like_one_process(
    tmp_path: Path, flags: list[str], unwrapped: tuple[list[float], dict[str, torch.Tensor]]
) -> None:
    losses, weights = unwrapped
    _job(tmp_path / "run", 4, "--tensor-parallel-size", "2", *flags)
    saved = _saved(tmp_path / "run")

    assert _losses(tmp_path / "run") == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(saved, weights, rtol=1e-4, atol=1e-5)


def test_training_continues_from_a_pretrained_folder(tmp_path: Path) -> None:
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(**TINY_LLAMA)).save_pretrained(tmp_path / "before")
    losses, weights = _unwrapped_training(_loaded(tmp_path / "before"))
    run_ranks(2, _train, [*FLAGS, "--pretrained", str(tmp_path / "before"), "--output", str(tmp_path / "after")])
    saved = _saved(tmp_path / "after")

    assert _losses(tmp_path / "after") == pytest.approx(losses, rel=1e-6)
    assert [name for name in weights if not torch.equal(saved[name], weights[name])] == []


def test_tied_weight_is_saved_once(tmp_path: Path) -> None:
    _job(tmp_path / "one", 1, tie_word_embeddings=True)
    _job(tmp_path / "two", 2, tie_word_embeddings=True)
    one, two = (_saved(tmp_path / name) for name in ("one", "two"))

    assert "lm_head.weight" not in two
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5)
    model = LlamaForCausalLM.from_pretrained(tmp_path / "two")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_bfloat16_is_the_dtype_of_the_arithmetic_alone(tmp_path: Path, of_one_process: tuple[Path, list[str]]) -> None:
    _job(tmp_path / "half", 2, "--dtype", "bfloat16")
    saved = _saved(tmp_path / "half")

    assert {weight.dtype for weight in saved.values()} == {torch.float32}
    assert _losses(tmp_path / "half") != _losses(of_one_process[0])
    assert _losses(tmp_path / "half") == pytest.approx(_losses(of_one_process[0]), rel=2e-2)


def test_wrong_flag_is_one_sentence_under_torchrun(tmp_path: Path) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    finished = subprocess.run(
        [sys.executable, *command, str(TRAIN), "--dtype", "float64", "--output", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )

    assert finished.returncode != 0
    assert finished.stderr.count("train.py: argument --dtype: invalid choice: 'float64'") == 1
    assert not (tmp_path / "run").exists()


def test_a_device_that_cannot_be_used_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import train

    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    FakeXla(import_error=ModuleNotFoundError("No module named 'torch_xla'", name="torch_xla")).install(monkeypatch)
    for device, sentence in (
        ("cuda", "train.py: device='cuda' needs a CUDA device, and "),
        (
            "xla",
            "train.py: device='xla': torch_xla is not installed. Install nxdpp in a virtual environment of its own",
        ),
    ):
        with pytest.raises(SystemExit, match="2"):
            train.main(["--device", device])
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(sentence)


def test_a_second_run_replaces_the_first_when_it_saves(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (printed,) = _job(folder, 1)
    assert "holds an earlier run" not in printed
    names = {file.name for file in folder.iterdir()}
    before = {file: file.read_bytes() for file in folder.iterdir() if file.is_file()}

    # A run that ends before it saves, and one that saves.
    with pytest.raises(AssertionError, match="is nan"):
        _job(folder, 1, "--learning-rate", "1e30")
    assert {file: file.read_bytes() for file in before} == before
    (printed,) = _job(folder, 1, "--seed", "9")

    said = f"{folder} holds an earlier run, which stays until this one saves, and is then replaced"
    assert said in printed
    assert {file.name for file in folder.iterdir()} == names
    assert len(_losses(folder)) == STEPS
    weights, metrics = folder / "model.safetensors", folder / "metrics.jsonl"
    assert weights.read_bytes() != before[weights]
    assert metrics.read_bytes() != before[metrics]


def test_a_loss_that_is_not_finite_in_the_first_step(tmp_path: Path) -> None:
    model = LlamaForCausalLM(LlamaConfig(**TINY_LLAMA))
    model.lm_head.weight.data.mul_(1e38)
    model.save_pretrained(tmp_path / "before")
    flags = [*FLAGS, "--pretrained", str(tmp_path / "before"), "--output", str(tmp_path / "after")]
    with pytest.raises(AssertionError, match=r"the loss of step 1 is (nan|inf): no weight was updated.*without labels"):
        run_ranks(1, _train, flags)


def test_a_diverging_training_names_the_learning_rate(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"the loss of step \d is nan: try a smaller --learning-rate"):
        _job(tmp_path / "run", 1, "--learning-rate", "1e30")

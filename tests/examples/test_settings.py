"""The flags of the main job: each mistake is one sentence, found before any work."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from settings import read_settings

from nxdpp.doors.nxd.checkpoint import save_checkpoint
from tests.examples.tiny import TINY_LLAMA


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.chdir(tmp_path)


def _config(folder: Path, **fields: Any) -> str:
    file = folder / "config.json"
    file.write_text(json.dumps({**TINY_LLAMA, **fields}))
    return str(file)


def _refusal(*arguments: str) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        _ = read_settings(arguments).config
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults() -> None:
    settings = read_settings([])

    assert settings.config.vocab_size == 256
    assert settings.dtype == "float32"
    assert settings.device is None
    assert settings.output == Path("runs/llama")
    assert settings.output.is_dir()
    assert settings.pipeline_parallel_size == 1


def test_every_flag_is_used(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"0123456789" * 100)
    settings = read_settings(
        f"--config {_config(tmp_path)} --data {text} --steps 3 --batch-size 6 --seq-length 32 "
        f"--num-microbatches 2 --learning-rate 0.5 --seed 7 --dtype bfloat16 --output {tmp_path / 'a' / 'b'} "
        "--pipeline-parallel-size 1 --max-grad-norm 0.25 --device xla".split()
    )

    assert settings.config.hidden_size == 32
    assert settings.corpus.train_files == (text,)
    assert (settings.steps, settings.batch_size, settings.seq_length) == (3, 6, 32)
    assert (settings.num_microbatches, settings.learning_rate, settings.seed) == (2, 0.5, 7)
    assert settings.max_grad_norm == 0.25
    assert settings.dtype == "bfloat16"
    assert settings.device == "xla"
    assert settings.config._attn_implementation == "eager"
    assert (tmp_path / "a" / "b").is_dir()


def test_a_pretrained_folder_has_its_configuration(tmp_path: Path) -> None:
    _config(tmp_path)
    settings = read_settings(f"--pretrained {tmp_path} --seq-length 32 --output {tmp_path}".split())

    assert settings.pretrained == tmp_path
    assert settings.config.hidden_size == 32
    assert "exclude each other" in _refusal("--pretrained", str(tmp_path), "--config", str(tmp_path / "config.json"))
    assert "cannot read" in _refusal("--pretrained", str(tmp_path / "nothing"))


def test_processes_beyond_the_stages_are_replicas(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")

    assert read_settings([]).pipeline_parallel_size == 4
    assert read_settings(["--pipeline-parallel-size", "2", "--batch-size", "16"]).pipeline_parallel_size == 2
    assert "2 data-parallel replica(s) of --num-microbatches 8" in _refusal(
        "--pipeline-parallel-size", "2", "--batch-size", "8"
    )
    assert read_settings(["--tensor-parallel-size", "2"]).pipeline_parallel_size == 2
    assert "num_attention_heads of 3 does not divide over --tensor-parallel-size 2" in _refusal(
        *["--tensor-parallel-size", "2", "--seq-length", "32", "--config"],
        _config(tmp_path, num_attention_heads=3, hidden_size=36),
    )
    sequence = ["--sequence-parallel", "--tensor-parallel-size", "2", "--seq-length"]
    assert read_settings([*sequence, "32"]).sequence_parallel
    assert "--seq-length 33 does not divide over --tensor-parallel-size 2" in _refusal(*sequence, "33")
    assert "give --tensor-parallel-size too, or leave it out" in _refusal("--sequence-parallel")
    zero1 = ["--pipeline-parallel-size", "2", "--batch-size", "16", "--zero1"]
    assert read_settings(zero1).zero1
    assert "4 process(es) with --pipeline-parallel-size 4 are one replica: leave it out" in _refusal("--zero1")
    assert "--shard divides the optimizer's state over data-parallel replicas, and 4 process" in _refusal("--shard")
    assert "--shard divides the optimizer's state too: leave --zero1 out" in _refusal(*zero1, "--shard")
    assert "on XLA give --zero1 in its place" in _refusal("--shard", "--device", "xla")
    shard = [*zero1[:-1], "--shard"]
    assert (read_settings(shard).shard, read_settings([*shard, "microbatch"]).shard) == ("once", "microbatch")
    assert "4 processes do not divide into pipelines of --pipeline-parallel-size 3" in _refusal(
        "--pipeline-parallel-size", "3"
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--steps 0", "argument --steps: '0' is not a whole number of at least 1"),
        ("--steps ten", "argument --steps: 'ten' is not a whole number of at least 1"),
        ("--seed -1", "argument --seed: '-1' is not a whole number of at least 0"),
        ("--learning-rate nan", "argument --learning-rate: 'nan' is not a number above 0"),
        ("--learning-rate 0", "argument --learning-rate: '0' is not a number above 0"),
        ("--dtype float64", "argument --dtype: invalid choice: 'float64' (choose from"),
        ("--device tpu", "argument --device: invalid choice: 'tpu' (choose from"),
        ("--nothing 8", "unrecognized arguments: --nothing 8 (--help lists the flags)"),
        ("--step 8", "unrecognized arguments: --step 8 (did you mean --steps? --help lists the flags)"),
        ("--schedul=zb-v --trac t", "--trac t (did you mean --schedule, --trace? --help"),
        ("--compare --steps 1", "--compare leaves the first step out, and --steps is 1: give at least 2 steps"),
        ("--batch-size 12", "--batch-size 12 does not divide into 1 data-parallel replica(s)"),
        ("--seq-length 2000", "longer than the model's max_position_embeddings"),
        ("--data missing.txt", "cannot read missing.txt: No such file or directory"),
        ("--config missing.json", "cannot read missing.json: No such file or directory"),
        ("--output /dev/null/run", "cannot write to --output /dev/null/run: Not a directory"),
        ("--output /proc/run", "cannot write to --output /proc/run: "),
        ("--output /dev/null", "cannot write to --output /dev/null: it is no folder"),
        ("--checkpoint-every 1 --checkpoint-dir /proc/run", "cannot write to --checkpoint-dir /proc/run: "),
    ],
)
def test_wrong_flag(arguments: str, sentence: str) -> None:
    assert sentence in _refusal(*arguments.split())


def test_more_stages_than_layers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")

    assert "2 layers are too few for 3 pipeline stages" in _refusal("--config", _config(tmp_path))


@pytest.mark.parametrize(
    ("size", "seq_length", "sentence"),
    [
        (100, 64, "held out has 5 bytes, fewer than one sequence of --seq-length 64"),
        (50, 64, "to train on has 48 bytes, fewer than one sequence of --seq-length 64"),
        (0, 64, "no text in"),
    ],
)
def test_too_little_text(tmp_path: Path, size: int, seq_length: int, sentence: str) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"x" * size)

    assert sentence in _refusal("--data", str(text), "--seq-length", str(seq_length))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"vocab_size": 255}, "vocab_size of 255: a token is a byte here, so it must be at least 256"),
        ({"model_type": "gpt2"}, "is the config of a 'gpt2' model, not of a Llama"),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0: it must be at least 1"),
        ({"hidden_size": "wide"}, "no Llama runs with"),
        ({"hidden_act": "nothing"}, "no Llama runs with"),
        ({"num_attention_heads": 3}, "no Llama runs with"),
        ({"num_key_value_heads": 7, "num_attention_heads": 8}, "no Llama runs with"),
    ],
)
def test_wrong_config(tmp_path: Path, fields: dict[str, Any], sentence: str) -> None:
    assert sentence in _refusal("--seq-length", "32", "--config", _config(tmp_path, **fields))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [("{", "is not JSON"), ("[1]", "a JSON object is needed, it holds a list"), ("\udcff", "is not JSON")],
)
def test_config_that_is_not_an_object(tmp_path: Path, content: str, sentence: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content.encode(errors="surrogateescape"))

    assert sentence in _refusal("--config", str(file))


def test_wrong_flags_are_answered_without_torch() -> None:
    """Its import takes seconds; so does that of transformers."""
    folder = Path(__file__).parents[2] / "examples" / "llama"
    without = "import sys; sys.modules.update(torch=None, transformers=None, rich=None); import train; train.main"
    arguments = ["--schedule", "zb-v", "--virtual-pipeline-size", "3"]
    finished = subprocess.run(
        [sys.executable, "-c", f"{without}({arguments})"],
        capture_output=True,
        text=True,
        timeout=20,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])},
    )
    assert finished.returncode == 2
    assert finished.stdout == ""
    assert re.fullmatch(r"train.py: --schedule zb-v with .* not 3\n", finished.stderr)


def test_schedules_partitions_and_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each is checked with the numbers of ranks, microbatches and layers, before torch is imported."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    settings = read_settings([])
    assert (settings.schedule, settings.virtual_pipeline_size, settings.partition) == (None, 1, "even")
    assert (settings.trace, settings.compare) == (None, False)
    given = "--schedule interleaved --virtual-pipeline-size 2 --partition balanced --trace t.json --compare"
    settings = read_settings(given.split())
    assert (settings.schedule, settings.virtual_pipeline_size, settings.partition) == ("interleaved", 2, "balanced")
    assert (settings.trace, settings.compare) == (Path("t.json"), True)

    assert "there is no schedule '2f2b'. Choose one of gpipe, 1f1b" in _refusal("--schedule", "2f2b")
    sentence = (
        "--schedule 1f1b with --virtual-pipeline-size 2 on 4 pipeline rank(s) with --num-microbatches 8: 1f1b has 1"
    )
    assert sentence in _refusal("--schedule", "1f1b", "--virtual-pipeline-size", "2")
    assert "8 layers are too few for 12 pipeline stages: take fewer" in _refusal("--virtual-pipeline-size", "3")
    (tmp_path / "own.csv").write_text("0F0,0B0\n1F0,1B0\n")
    sentence = "the schedule is for {'ranks': 2, 'microbatches': 1}; this pipeline has {'ranks': 4, 'microbatches': 8}"
    assert sentence in _refusal("--schedule", "own.csv")
    (tmp_path / "uneven.csv").write_text("0F0,1F0,1B0,0B0\n2F0,2B0\n")
    uneven = ["--pipeline-parallel-size", "2", "--num-microbatches", "1", "--schedule", "uneven.csv"]
    assert read_settings(uneven).schedule == "uneven.csv"
    assert "3 stages on 2 ranks: leave --partition out" in _refusal(*uneven, "--partition", "balanced")
    profiled = ["--partition", "profiled", "--tensor-parallel-size"]
    assert read_settings([*profiled, "1"]).partition == "profiled"
    assert "--tensor-parallel-size 2: take --partition balanced" in _refusal(*profiled, "2")
    two = ["--pipeline-parallel-size", "2", "--num-microbatches", "1", "--schedule", "own.csv"]
    assert read_settings(two).schedule == "own.csv"
    assert "argument --partition: invalid choice: 'odd'" in _refusal("--partition", "odd")
    assert f"--trace '{tmp_path}' is a folder" in _refusal("--trace", str(tmp_path))
    assert "t.json': there is no folder " in _refusal("--trace", str(tmp_path / "nothing" / "t.json"))
    # Rank 0 makes the output folder.
    assert read_settings(["--output", "new", "--trace", "new/t.json"]).trace == Path("new/t.json")
    assert "there is no folder " in _refusal("--output", "other", "--trace", "another/t.json")
    assert "--compare measures one process on the CPU or on CUDA" in _refusal("--compare", "--device", "xla")


def test_only_rank_0_creates_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    read_settings(["--output", "run"])

    assert not (tmp_path / "run").exists()


def test_checkpoints_of_the_training(tmp_path: Path) -> None:
    settings = read_settings([])
    assert settings.checkpoint_every is None
    assert settings.resume is None
    settings = read_settings(["--checkpoint-every", "5", "--resume"])
    assert (settings.checkpoint_every, settings.resume) == (5, "auto")
    assert read_settings(["--resume", "auto"]).resume == "auto"
    assert "no directory of a whole checkpoint" in _refusal("--resume", str(tmp_path / "step_5"))
    assert "at least 1" in _refusal("--checkpoint-every", "0")
    assert (settings.checkpoint_keep, settings.checkpoint_async, settings.checkpoint_errors) == (3, None, "end")
    assert settings.checkpoint_dir == Path("runs/llama/checkpoints")
    saves = [
        "--checkpoint-dir",
        "elsewhere",
        "--checkpoint-keep",
        "2",
        "--checkpoint-errors",
        "go-on",
        "--checkpoint-async",
    ]
    settings = read_settings(["--checkpoint-every", "5", *saves])
    assert (settings.checkpoint_keep, settings.checkpoint_async, settings.checkpoint_errors) == (2, "wait", "go-on")
    assert settings.checkpoint_dir == Path("elsewhere")
    assert read_settings(["--checkpoint-every", "5", *saves, "skip"]).checkpoint_async == "skip"
    assert "--checkpoint-keep is for the saves of --checkpoint-every" in _refusal("--checkpoint-keep", "2")
    assert "argument --checkpoint-async: invalid choice" in _refusal(
        *["--checkpoint-every", "5", "--checkpoint-async", "x"]
    )

    checkpoint = tmp_path / "runs" / "llama" / "checkpoints" / "step_5"
    save_checkpoint(checkpoint.parent, checkpoint.name)
    assert read_settings(["--resume", str(checkpoint)]).resume == checkpoint
    # An earlier run is not mixed with a new one.
    assert "go on with --resume auto" in _refusal()
    assert read_settings(["--resume", "auto"]).resume == "auto"
    assert read_settings(["--output", str(tmp_path / "another")]).resume is None


def test_fewer_processes_of_a_resumed_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """One replica alone has nothing to divide the optimizer over, and goes on all the same."""
    flags = ["--zero1", "--pipeline-parallel-size", "1", "--resume"]
    assert not read_settings(flags).zero1
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert read_settings([*flags, "auto", "--batch-size", "16"]).zero1


def test_the_printed_commands_have_flags_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all hosts, and with those that are left."""
    text = (Path(__file__).parents[2] / "docs" / "faults.md").read_text()
    found = [
        command.split("train.py")[1].split()
        for command in re.findall(r"```\n((?:OMP_NUM_THREADS=1 )?torchrun .*?)```", text, re.DOTALL)
    ]
    one, several = found
    for arguments, sizes in ((one, [4]), (several, [8, 4])):
        for size in sizes:
            monkeypatch.setenv("WORLD_SIZE", str(size))
            assert read_settings(arguments).checkpoint_every == 100
    assert "2 processes do not divide into pipelines of --pipeline-parallel-size 4" in _of_two(monkeypatch, several)


def _of_two(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> str:
    monkeypatch.setenv("WORLD_SIZE", "2")
    return _refusal(*arguments)

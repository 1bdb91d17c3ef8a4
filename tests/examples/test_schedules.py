"""Schedules, partitions and the trace of the main job: the same losses to the last bit, in every order of the work."""

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.examples.tiny import TINY_LLAMA, run_main_job
from tests.support.run_ranks import run_ranks

pytestmark = pytest.mark.one_python

STEPS = 2
FLAGS = f"--steps {STEPS} --batch-size 8 --seq-length 16 --num-microbatches 4".split()


def _arguments(folder: Path, *flags: str) -> list[str]:
    config, text = folder.with_suffix(".json"), folder.with_suffix(".txt")
    config.write_text(json.dumps({**TINY_LLAMA, "num_hidden_layers": 4}))
    text.write_bytes(bytes(range(32, 120)) * 30)
    return [*FLAGS, "--config", str(config), "--data", str(text), "--output", str(folder), *flags]


def _train(rank: int, *jobs: list[str]) -> list[str]:
    """Run the jobs one after the other; return the output of each."""
    printed = []
    for arguments in jobs:
        with contextlib.redirect_stdout(io.StringIO()) as written:
            run_main_job(arguments)
        printed.append(written.getvalue())
    return printed


def _losses(folder: Path) -> list[float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(records) == STEPS
    return [record["loss"] for record in records]


def test_each_schedule_has_the_losses_of_the_default_one(tmp_path: Path) -> None:
    csv = tmp_path / "own.csv"
    csv.write_text("0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F0,1F1,1F2,1F3,1B0,1B1,1B2,1B3\n")
    jobs: dict[str, list[str]] = {
        "default": [],
        "interleaved": [
            "--schedule",
            "interleaved",
            "--virtual-pipeline-size",
            "2",
            "--trace",
            str(tmp_path / "t [red].json"),
        ],
        "zero-bubble": ["--schedule", "zb-v", "--partition", "balanced", "--compare"],
        "own": ["--schedule", str(csv), "--partition", "profiled"],
    }
    folders = {name: tmp_path / name for name in jobs}
    once = _arguments(tmp_path / "once", "--steps", "1", "--trace", str(tmp_path / "once.json"))
    arguments = [_arguments(folders[name], *flags) for name, flags in jobs.items()]
    printed: list[Any] = run_ranks(2, _train, *arguments, once, timeout=150.0)
    for name in jobs:
        assert _losses(folders[name]) == _losses(folders["default"]), name
    assert "0, 2 │       0 │ model.layers.0, 2" in printed[0][1]
    # Rank 0 alone measures one process, and says so.
    assert re.search(r"^one process +[0-9.,]+ ms ", printed[0][2], re.M), printed[0][2]
    assert "one process" not in printed[0][1]
    assert printed[1] == [""] * len(printed[0])
    # Brackets are no markup, and the line is not broken. A step without figures is recorded too.
    (last,) = re.findall(rf"step (\d+) of {tmp_path}/t \[red\].json\n", printed[0][1])
    (of_one,) = re.findall(rf"step (\d+) of {tmp_path}/once.json\n", printed[0][-1])
    assert int(of_one) == int(last) - STEPS + 1
    events = [each for each in json.loads((tmp_path / "t [red].json").read_text()) if each["ph"] == "X"]
    computed = [each["args"] for each in events if each["cat"] == "compute" and each["tid"] == 0]
    assert {each["stage"] for each in computed if each["step"] == int(last)} == {0, 2}
    names = {each["args"]["step"]: each["name"] for each in events if each["cat"] == "step"}
    assert names[int(last)].startswith(f"step {last}, train")
    assert names[int(last) + 1].startswith(f"step {int(last) + 1}, eval")


# test_train has tensor ranks, and pipeline/whole/test_tensor_parallel their schedules.
@pytest.mark.sweep
def test_tensor_ranks_with_other_schedules_and_partitions(tmp_path: Path) -> None:
    tensor = ["--tensor-parallel-size", "2", "--sequence-parallel"]
    trace = ["--schedule", "interleaved", "--partition", "balanced", "--trace", str(tmp_path / "t.json")]
    jobs = {"default": tensor, "other": [*tensor, *trace]}
    folders = {name: tmp_path / name for name in jobs}
    run_ranks(4, _train, *(_arguments(folders[name], *flags) for name, flags in jobs.items()), timeout=150.0)
    for name in jobs:
        assert _losses(folders[name]) == _losses(folders["default"]), name

"""``python -m nxdpp plan --devices``: the printed layouts, and the printed lines, which a job runs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nxdpp.__main__ import main
from nxdpp.pipeline.planning.plan import Plan

ROOT = Path(__file__).parents[3]
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "use_cache": False,
    "dtype": "float32",
}
SEARCH = ["--devices", "2", "--device-memory", "1GB", "--global-batch", "4", "--device", "cpu", "--link", "1GB/s"]
# The script of a user; its middle is the printed text.
BEFORE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig.from_json_file("config.json"))
tokens = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(1))
with torch.no_grad():
    expected = sum(model(input_ids=row[None], labels=row[None]).loss for row in tokens) / 4
"""
AFTER = """
loss = model.run_train(input_ids=tokens, labels=tokens)
if loss is not None:
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    print("the loss is that of one process")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def _plan(folder: Path, *options: str) -> int:
    return main(["plan", str(folder), *SEARCH, *options])


@pytest.mark.one_python
def test_the_printed_lines_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fixed = ["--pipeline-parallel-size", "2", "--virtual-pipeline-size", "2"]
    assert _plan(folder, *fixed, "--write", str(folder / "plan.json")) == 0
    table, command, script = capsys.readouterr().out.split("\n\n")

    rows = [line.split("│") for line in table.splitlines() if line.startswith("│")]
    assert [row[1].strip() for row in rows] == [str(number) for number in range(1, 11)]
    assert {row[2].strip() for row in rows} == {"1 x 2 x 1"}
    times = [float(row[7]) for row in rows]
    assert times == sorted(times)
    assert command == "torchrun --nproc-per-node 2 train.py"
    assert Plan.read(folder / "plan.json").script() == script.strip()

    (folder / "train.py").write_text(BEFORE + script + AFTER)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command.split(), cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "the loss is that of one process" in ended.stdout


def test_a_plan_is_read_as_it_was_written(folder: Path) -> None:
    assert _plan(folder, "--best", "2", "--data-parallel-size", "2", "--write", str(folder / "plan.json")) == 0
    plan = Plan.read(folder / "plan.json")

    assert len(plan.best) == 2
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(ValueError, match=r"the text is no plan of nxdpp\.plan: version 7 is not 1"):
        Plan.from_json(plan.to_json().replace('"version": 1', '"version": 7'))
    with pytest.raises(ValueError, match="the text is no plan"):
        Plan.from_json("{}")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (
            ["--device-memory", "1kB", "--data-parallel-size", "2"],
            r"no layout fits into .* GiB of a device: the smallest one needs .* GiB \(tensor",
        ),
        (["--device-memory", "80"], "device_memory='80' is not understood: give a number and one of B, kB"),
        (["--link", "5GB"], "link='5GB' is no rate: end it with /s"),
        (["--hosts", "3"], "2 devices do not divide over 3 hosts"),
        (["--global-batch", "0"], "global_batch=0 must be a whole number of at least 1"),
        (["--devices", "0"], "devices=0 must be a whole number of at least 1"),
        (["--num-microbatches", "4"], "--num-microbatches: the search chooses it. Leave it out with --devices"),
        (["--partition", "balanced"], "--partition: the search chooses it"),
        (["--pipeline-parallel-size", "8"], "no layout of 2 devices on 1 hosts with pipeline=8 fits the model"),
    ],
)
def test_errors_are_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], error: str
) -> None:
    assert _plan(folder, *options) == 2
    assert re.search(error, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--devices", "2"], "--device-memory, --global-batch: missing. A search with --devices needs it"),
        (["--hosts", "2"], "--hosts: for a search. Add --devices"),
        ([], "--pipeline-parallel-size, --num-microbatches: missing"),
    ],
)
def test_missing_options_are_named(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], error: str
) -> None:
    assert main(["plan", str(folder), *options]) == 2
    assert error in capsys.readouterr().err

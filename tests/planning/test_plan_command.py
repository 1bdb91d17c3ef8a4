"""``python -m nxdpp plan --devices``: the printed layouts, and the printed lines, which a job runs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

import nxdpp
from nxdpp.__main__ import main
from nxdpp.planning.layout import Layout
from nxdpp.planning.plan import Plan
from tests.planning.json_keys import keys_in, keys_of
from tests.support.run_program import run_program

ROOT = Path(__file__).parents[2]
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
# Layouts of the other printed scripts that run in the same start.
SWITCHES = [
    Layout(tensor=2, sequence=True, checkpoint=True),
    Layout(pipeline=2, chunks=2, schedule="dualpipe-v", checkpoint=True, microbatch=2),
    Layout(data=2, zero=1, checkpoint=True),
    Layout(data=2, zero=3),
]
# The script of a user, with printed texts in the place of its own lines: two steps have the losses of one process.
TRAIN = """
import copy
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
given = LlamaForCausalLM(LlamaConfig.from_json_file("config.json"))
tokens = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(1))
for text in sys.argv[1:]:
    whole = copy.deepcopy(given)
    adamw = torch.optim.AdamW(whole.parameters(), lr=3e-4)
    names = {"model": copy.deepcopy(given)}
    exec(Path(text).read_text(), names)
    model, optimizer, state = names["model"], names["optimizer"], names["parallel_state"]
    part = slice(state.get_data_parallel_rank(), None, state.get_data_parallel_size())
    for step in range(2):
        losses = torch.stack([whole(input_ids=row[None], labels=row[None]).loss for row in tokens])
        loss = model.run_train(input_ids=tokens[part], labels=tokens[part])
        if loss is not None:
            torch.testing.assert_close(loss, losses[part].mean().detach(), rtol=1e-5, atol=0, msg=f"{text}, {step}")
            print(f"{text}: the loss of step {step} is that of one process")
        losses.mean().backward()
        for each in (adamw, optimizer):
            each.step()
            each.zero_grad()
    state.destroy_model_parallel()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def _plan(folder: Path, *options: str) -> int:
    return main(["plan", str(folder), *SEARCH, *options])


def test_the_printed_lines_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fixed = ["--pipeline-parallel-size", "2", "--virtual-pipeline-size", "2"]
    assert _plan(folder, *fixed, "--write", str(folder / "plan.json")) == 0
    _, table, command, source = capsys.readouterr().out.split("\n\n", 3)

    # A row for each choice: without activation checkpointing, and with it.
    rows = [line for line in table.splitlines() if re.match(r"\d", line)]
    assert [row.split()[0] for row in rows] == ["1", "2"]
    assert all(re.match(r"\d+ +1 x 2 x 1 ", row) for row in rows)
    assert [" c " in row for row in rows] == [False, True]
    times = [float(row.split()[-4]) for row in rows]
    assert times == sorted(times)
    assert "--write train.py: the program below; --write plan.json: for\n  NxDPPModel.from_plan(model, plan)" in table
    script = Plan.read(folder / "plan.json").script()
    assert set(script.splitlines()[-4:]) <= set(source.splitlines())

    config = LlamaConfig.from_json_file(folder / "config.json")
    scripts = [script]
    for layout in SWITCHES:
        found = nxdpp.plan(config, devices=2, device_memory="1GB", global_batch=4, device="cpu", layouts=[layout])
        scripts.append(found.script())
    names = [f"{number}.txt" for number in range(len(scripts))]
    for name, text in zip(names, scripts, strict=True):
        (folder / name).write_text(text)
    (folder / "train.py").write_text(TRAIN)
    assert command == "torchrun --nproc-per-node 2 train.py"
    ended = run_program("train.py", names, 2, folder=folder)
    assert ended.codes == [0, 0], ended.output
    for name in names:
        assert f"{name}: the loss of step 1 is that of one process" in ended.output
    for word in (
        "tensor_parallelize(model, sequence_parallel=True)",
        "apply_checkpoint(model)",
        "Zero1Optimizer(",
        "fully_shard(",
    ):
        assert any(word in text for text in scripts)


def test_a_plan_is_read_as_it_was_written(folder: Path) -> None:
    assert _plan(folder, "--best", "2", "--data-parallel-size", "2", "--write", str(folder / "plan.json")) == 0
    plan = Plan.read(folder / "plan.json")

    assert len(plan.best) == 2
    assert Plan.from_json(plan.to_json()) == plan
    content = json.loads(plan.to_json())
    older = {name: value for name, value in content.items() if name not in ("autocast", "note", "parameters")}
    assert Plan.from_json(json.dumps(older)).best == plan.best
    with pytest.raises(ValueError, match=r"the text is no plan of nxdpp\.plan: .* argument: 'model'"):
        Plan.from_json(json.dumps({name: value for name, value in content.items() if name != "model"}))
    with pytest.raises(ValueError, match=r"the text is no plan of nxdpp\.plan: version 7 is not 3"):
        Plan.from_json(plan.to_json().replace('"version": 3', '"version": 7'))
    with pytest.raises(ValueError, match="the text is no plan"):
        Plan.from_json("{}")


def test_an_edited_plan_is_refused(tmp_path: Path) -> None:
    written = tmp_path / "plan.json"
    job: dict[str, Any] = {"devices": 2, "device_memory": "1GB", "global_batch": 4, "device": "cpu"}
    plan = nxdpp.plan(LlamaConfig.from_dict(CONFIG), layouts=[Layout(data=2)], **job)
    for before, after, error in (
        ('"pipeline": 1', '"pipeline": 4', r"tensor 1 x pipeline 4 .* needs 8 devices, not 2 on 1 host"),
        ('"global_batch": 4', '"global_batch": 7', "a global batch of 7 does not divide over 2 replicas"),
        ('"dtype": ', '"other": ', "other"),
        ('"schedule": "1f1b"', '"schedule": "2f2b"', "there is no schedule '2f2b'"),
        ('"cuts": []', '"cuts": ["model.layers.0"]', r"needs 0 cuts, not \['model.layers.0'\]"),
        ('"hosts": 1', '"hosts": "1"', "the text is no plan"),
        ("}\n", "", "the text is no plan"),
    ):
        text = plan.to_json()
        assert before in text
        written.write_text(text.replace(before, after))
        with pytest.raises(ValueError, match=r"plan\.json: the text is no plan of nxdpp\.plan: .*") as caught:
            Plan.read(written)
        assert re.search(error, str(caught.value))


def test_a_printed_plan_is_the_table_of_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    undivided = ["--tensor-parallel-size", "1"]
    assert _plan(folder, *undivided, "--best", "2", "--device", "h100", "--write", str(folder / "plan.json")) == 0

    title, table, _ = capsys.readouterr().out.split("\n\n", 2)
    plan = Plan.read(folder / "plan.json")
    printed = str(plan).splitlines()
    assert printed[:3] == [title.splitlines()[0], "parameters: 31,968", ""]
    assert printed[0] == "LlamaForCausalLM, 2 h100 devices on 1 host, 4 samples per step"
    legend = table.splitlines()
    assert printed[3:] == legend[: len(printed) - 3]
    assert re.match(r"1 +\d x \d x \d .* \d\S* +[\d.]+ [KM]iB +[\d.]+%$", printed[5])
    assert max(map(len, printed)) <= 80
    assert repr(plan).startswith("Plan(model='LlamaForCausalLM', devices=2, ")


def test_json_of_a_search(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The document has what ``nxdpp.plan`` returns; its keys are those of docs/planner.md."""
    assert (
        _plan(folder, "--json", "--data-parallel-size", "2", "--best", "2", "--write", str(folder / "plan.json")) == 0
    )

    printed = json.loads(capsys.readouterr().out)
    plan = Plan.read(folder / "plan.json")
    first = printed["best"][0]
    assert (first["step_seconds"], first["peak_bytes"]) == (plan.first.step_seconds, plan.first.peak_bytes)
    assert (printed["dtype"], printed["version"]) == ("float32", 3)
    assert printed == json.loads(plan.to_json())
    assert keys_of(printed) == keys_in(ROOT / "docs" / "planner.md")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (
            ["--device-memory", "1kB", "--data-parallel-size", "2"],
            r"no layout fits into .* GiB of a device: the smallest one needs .* GiB \(tensor",
        ),
        (["--device-memory", "80"], "device_memory='80' is not understood: give a number and one of B, kB"),
        (["--link", "5GB"], "link='5GB' is not understood: .*, and end it with /s"),
        (["--hosts", "3"], "2 devices do not divide over 3 hosts"),
        (["--best", "0"], "best=0 must be a whole number of at least 1"),
        (["--zero", "1", "--data-parallel-size", "1"], "with data=1, zero=1 fits .* ZeRO needs replicas"),
        (["--num-microbatches", "4"], "--num-microbatches: the search chooses it. Leave it out with --devices"),
        (["--write", "plan.txt"], "--write plan.txt: name a .py file for a program, or a .json file for the plan"),
        (["--measure", "--device", "tpu-v5p"], "this machine has no xla device to measure"),
    ],
)
def test_errors_are_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], error: str
) -> None:
    assert _plan(folder, *options) == 2
    assert re.search(error, capsys.readouterr().err)

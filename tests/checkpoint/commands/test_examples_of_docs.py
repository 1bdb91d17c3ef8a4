"""Commands of docs/checkpoints.md print the output beside them, and its program goes on exactly."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import AdamW
from transformers import LlamaConfig, LlamaForCausalLM

import nxdpp
from nxdpp.__main__ import main
from nxdpp.checkpoint.distributed.directory import DOCUMENT
from nxdpp.checkpoint.distributed.document import parsed_document, read_document
from nxdpp.ranks import parallel_state
from tests.support.run_ranks import run_ranks

pytestmark = pytest.mark.one_python

DOCS = Path(nxdpp.__file__).parents[1] / "docs" / "checkpoints.md"
_PROMPT = "$ python -m nxdpp "
# Sizes of the configuration and of the generators' states differ between versions and machines.
_VARYING = re.compile(r"^(And |out/step|step_).*", re.MULTILINE)


def train(path: Path) -> None:
    """Two steps of a Llama of one layer, each with a checkpoint."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    optimizer = AdamW(model.parameters(), lr=0.001)
    ids = torch.arange(8).view(1, 8)
    for step in (1, 2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        nxdpp.save_checkpoint(path, f"step_{step}", model, optimizer, user_content={"step": step})


def damage(folder: Path, name: str) -> None:
    """Change one bit of a tensor's values."""
    metadata = parsed_document(folder, read_document(folder)).metadata
    span = next(span for index, span in metadata.storage_data.items() if index.fqn == name)
    content = bytearray((folder / span.file).read_bytes())
    content[span.start] ^= 1
    (folder / span.file).write_bytes(content)


def printed(commands: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The commands with their output, from the directory of a training in ``out``."""
    lines = []
    for command in commands:
        if "verify out/step_1" in command:
            damage(Path("out/step_1"), "model.model.norm.weight")
        main(command.split())
        lines.append(f"{_PROMPT}{command}\n{capsys.readouterr().out}")
    return "\n".join(lines)


def comparable(text: str) -> str:
    """``text`` without the parts that differ from save to save, and without spaces at the ends of lines."""
    text = re.sub(r"[0-9a-f]{8}-rank00000", "SAVE-rank00000", text)
    text = _VARYING.sub(lambda line: re.sub(r"\d[\d.,]*", "N", line[0]), text)
    return re.sub(r" +$", "", text, flags=re.MULTILINE)


def test_commands_print_what_the_docs_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    train(Path("out"))
    assert (tmp_path / "out" / "step_2" / DOCUMENT).is_file()
    blocks = re.findall(r"```console\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    commands = [line.removeprefix(_PROMPT) for block in blocks for line in block.splitlines() if line.startswith("$")]
    assert {command.split()[1] for command in commands} == {"show", "verify", "convert"}
    assert comparable(printed(commands, capsys)) == comparable("\n".join(blocks))


def go(rank: int, program: str, path: Path) -> list[dict[str, torch.Tensor]]:
    """This rank's weights after 12 steps: of a program that ends there, and of one that ends after 11 and goes on."""
    weights = []
    for name, lasts in (("whole", [12]), ("again", [11, 12])):
        (path / name).mkdir(exist_ok=True)
        os.chdir(path / name)
        for last in lasts:
            names: dict[str, Any] = {}
            exec(program.replace("range(first, 60)", f"range(first, {last})"), names)
            parallel_state.destroy_model_parallel()
        assert names["first"] == (10 if name == "again" else 0)
        weights.append(dict(names["model"].state_dict()))
    return weights


def test_the_program_goes_on_with_the_same_weights(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert "range(first, 60)" in program
    for whole, again in run_ranks(2, go, program, tmp_path):
        assert whole.keys() == again.keys()
        assert all(torch.equal(again[name], value) for name, value in whole.items())

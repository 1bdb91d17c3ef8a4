"""Commands of docs/checkpoints.md print the output that the page shows."""

import re
from pathlib import Path

import pytest
import torch
from torch.optim import AdamW
from transformers import LlamaConfig, LlamaForCausalLM

import nxdpp
from nxdpp.__main__ import main
from nxdpp.checkpoint.distributed.directory import DOCUMENT
from nxdpp.checkpoint.distributed.document import parsed_document, read_document

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

"""``python -m nxdpp checkpoint show`` and ``verify``: what a checkpoint has, and whether it is whole."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.optim import AdamW

from nxdpp.__main__ import main
from nxdpp.checkpoint.distributed.document import DOCUMENT
from nxdpp.trainer.checkpoint import save_checkpoint
from tests.support.tensor_models import VOCABULARY, llama


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training with a checkpoint after one step."""
    path = tmp_path_factory.mktemp("training")
    model = llama(tie_word_embeddings=True)
    optimizer = AdamW(model.parameters(), lr=0.125)
    ids = torch.arange(8).view(1, 8) % VOCABULARY
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    save_checkpoint(path, "step_1", model, optimizer, user_content={"step": 1, "mask": torch.ones(3)})
    return path


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint to damage."""
    folder = tmp_path / "step_1"
    folder.mkdir()
    for file in (saved / "step_1").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def _run(*arguments: object) -> int:
    return main(["checkpoint", *map(str, arguments)])


def _place_of(folder: Path, name: str) -> tuple[Path, int]:
    """File of a tensor, and its first byte."""
    block = json.loads((folder / DOCUMENT).read_text())["tensors"][name]["blocks"][0]
    return folder / block["file"], block["start"]


def test_show_prints_layout_content_and_a_row_for_each_tensor(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("show", saved) == 0
    text = capsys.readouterr().out
    assert f"{saved / 'step_1'}: checkpoint 1, " in text
    assert "saved by      1 tensor x 1 pipeline x 1 data, 1 ranks\n" in text
    assert "model         LlamaForCausalLM\n" in text
    assert "tied          lm_head.weight is model.embed_tokens.weight\n" in text
    assert "optimizer     AdamW with exp_avg, exp_avg_sq, step\n" in text
    assert '"lr": 0.125' in text
    assert 'user_content  {"step": 1, "mask": {"$tensor": "user_content.mask"}}' in text
    rows = {line.split()[0]: line for line in text.splitlines() if "float32" in line}
    # A parameter, exp_avg and exp_avg_sq of 32 floats.
    assert rows["model.norm.weight"].split()[1:] == ["float32", "[32]", "384", "B"]
    assert len(rows) == len(llama(tie_word_embeddings=True).state_dict()) - 1
    assert all(len(line) <= 80 for line in rows.values())


def test_verify_tells_a_whole_checkpoint(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("verify", saved / "step_1") == 0
    assert f"{saved / 'step_1'} is whole: " in capsys.readouterr().out


def test_verify_names_the_damaged_tensor_and_its_file(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, start = _place_of(copied, "optimizer.model.norm.weight.exp_avg")
    content = bytearray(file.read_bytes())
    content[start + 5] ^= 1
    file.write_bytes(content)
    assert _run("verify", copied) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(f"optimizer.model.norm.weight.exp_avg: {file} is damaged: bytes {start} to ")
    assert lines[1].startswith(f"{copied} is damaged: 1 of ")


def test_verify_names_all_tensors_of_a_truncated_file(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, start = _place_of(copied, "model.model.norm.weight")
    file.write_bytes(file.read_bytes()[: start + 3])
    assert _run("verify", copied) == 1
    text = capsys.readouterr().out
    assert f"model.model.norm.weight: {file} is truncated" in text
    file.unlink()
    assert _run("verify", copied) == 1
    assert f"model.model.norm.weight: {file} is missing, or this host does not share" in capsys.readouterr().out


def test_verify_tells_an_unfinished_and_a_damaged_document(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = copied / DOCUMENT
    text = document.read_text()
    document.write_text(text.replace('"step": 1', '"step": 2'))
    assert _run("verify", copied) == 1
    assert f"{document} is damaged" in capsys.readouterr().out
    document.unlink()
    assert _run("verify", copied) == 1
    assert f"{copied} is unfinished" in capsys.readouterr().out


@pytest.mark.parametrize("action", ["show", "verify"])
def test_a_path_without_a_checkpoint_is_an_error(
    action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(action, tmp_path) == 2
    assert f"{tmp_path} has no checkpoint of nxdpp" in capsys.readouterr().err
    assert _run(action, tmp_path / "missing") == 2
    assert "is not a directory" in capsys.readouterr().err


LIGHT = """
import sys
from nxdpp.__main__ import main
try:
    main(["checkpoint", "convert", "a", "b", "--to", "pickle"])
except SystemExit as ended:
    assert ended.code == 2
assert "torch" not in sys.modules
"""


def test_a_refused_flag_imports_no_torch() -> None:
    subprocess.run([sys.executable, "-c", LIGHT], check=True, timeout=120, capture_output=True)

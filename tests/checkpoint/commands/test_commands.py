"""``python -m nxdpp checkpoint show`` and ``verify``: what a checkpoint has, and whether it is whole."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from nxdpp.__main__ import main
from nxdpp.checkpoint.distributed.directory import DOCUMENT
from nxdpp.checkpoint.files import pieces
from nxdpp.doors.nxd.checkpoint import save_checkpoint
from tests.support.tensor_models import VOCABULARY, llama

Captured = pytest.CaptureFixture[str]


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


def test_verify_finds_each_damaged_byte_of_values_and_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A load reads no header, and other programs do."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 64)
    save_checkpoint(tmp_path, "1", nn.Linear(12, 5))
    file, start = _place_of(tmp_path / "1", "model.weight")
    content = file.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    for place in (*range(0, header, 9), *range(start, start + 12 * 5 * 4, 24)):
        file.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :])
        assert _run("verify", tmp_path / "1") == 1, place
        piece = start + (place - start) // 64 * 64
        text = (
            "damaged: its header does not have the tensors of the document."
            if place < header
            else f"model.weight: {file} is damaged: bytes {piece} to "
        )
        assert text in capsys.readouterr().out
    file.write_bytes(content)
    assert _run("verify", tmp_path / "1") == 0


def test_verify_tells_an_unfinished_and_a_damaged_document(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = copied / DOCUMENT
    text = document.read_text()
    document.write_text(text.replace('"step": 1', '"step": 2'))
    assert _run("verify", copied) == 1
    assert f"{document} is damaged" in capsys.readouterr().out
    document.unlink()
    assert _run("verify", copied) == 1
    assert f"{copied} is unfinished" in capsys.readouterr().out


def test_a_training_has_a_line_for_each_checkpoint(saved: Path, tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "training"
    shutil.copytree(saved, path)
    save_checkpoint(path, "step_2", llama(tie_word_embeddings=True), user_content={"step": 1})
    (path / "step_3").mkdir()
    (path / "step_3" / "0123abcd-rank00000.safetensors").touch()
    assert _run("show", path) == 0
    assert "\nstep_3        unfinished: checkpoint.json is missing\n" in capsys.readouterr().out
    file, start = _place_of(path / "step_1", "model.model.norm.weight")
    content = bytearray(file.read_bytes())
    content[start] ^= 1
    file.write_bytes(content)
    assert _run("verify", path) == 0
    assert _run("verify", path, "--all") == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[1:]] == [
        f"{path / 'step_2'} is whole",
        "model.model.norm.weight",
        f"{path / 'step_1'} is damaged",
    ]


def test_long_and_hostile_names_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    long = ".".join(f"module_{number}" for number in range(20))
    model = nn.Module()
    owner = model
    for part in long.split("."):
        owner.add_module(part, nn.Module())
        owner = owner.get_submodule(part)
    owner.register_parameter("[red]x[/red]", nn.Parameter(torch.zeros(1024, 1, 16, 1, 16).bfloat16()))
    owner.register_parameter("\x1b[31mred", nn.Parameter(torch.zeros(2)))
    save_checkpoint(tmp_path, "one", model)
    monkeypatch.setenv("COLUMNS", "80")
    assert _run("show", tmp_path) == 0
    text = capsys.readouterr().out
    table = text[text.index("\ntensor") + 1 :]
    assert all(len(line) <= 80 for line in table.splitlines())
    assert "bfloat16 [1024, 1, 16, 1, 16] 512.00 KiB" in " ".join(table.split())
    assert "…" not in text
    assert "\x1b" not in text
    assert f"{long}.[red]x[/red]" in "".join(line.split("  ")[0] for line in table.splitlines())


def test_other_formats_are_shown_and_verified(tmp_path: Path, capsys: Captured) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "model")
    ranks = ("--to", "nxd", "--tensor-parallel-size", 2)
    assert _run("convert", tmp_path / "model", tmp_path / "ranks", *ranks) == 0
    capsys.readouterr()
    for folder, title in (("model", "Hugging Face directory, 21 tensors"), ("ranks", "2 tensor x 1 pipeline, 2 files")):
        assert _run("show", tmp_path / folder) == 0
        text = capsys.readouterr().out
        assert title in text
        assert "model.norm.weight" in text
        assert _run("show", tmp_path / folder, "--json") == 0
        assert len(json.loads(capsys.readouterr().out)["tensors"]) == 21
        assert _run("verify", tmp_path / folder) == 0
        assert "Such files have no checksums" in capsys.readouterr().out
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    assert _run("verify", tmp_path / "model") == 1
    assert f"{file} is truncated or corrupt" in capsys.readouterr().out
    file = tmp_path / "ranks" / "tp_rank_01_pp_rank_00" / "checkpoint.pt"
    file.write_bytes(file.read_bytes()[:-400])
    assert _run("verify", tmp_path / "ranks") == 1
    assert f"{file} is damaged" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "ranks" / "tp_rank_00_pp_rank_00")
    assert _run("verify", tmp_path / "ranks") == 1
    assert "lacks the files of tp_rank_00_pp_rank_00" in capsys.readouterr().out

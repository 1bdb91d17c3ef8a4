"""``python -m nxdpp checkpoint show`` and ``verify``: what a checkpoint has, and whether it is whole."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from nxdpp.__main__ import main
from nxdpp.checkpoint.distributed.directory import DOCUMENT
from nxdpp.checkpoint.distributed.document import parsed_document, read_document, write_document
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


def test_show_prints_layout_content_and_a_row_for_each_tensor(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("show", saved) == 0
    text = capsys.readouterr().out
    assert f"{saved / 'step_1'}: checkpoint 1, " in text
    assert "saved by      1 tensor x 1 pipeline x 1 data, 1 rank\n" in text
    assert "model         LlamaForCausalLM\n" in text
    assert "tied          lm_head.weight is model.embed_tokens.weight\n" in text
    assert "optimizer     AdamW with exp_avg, exp_avg_sq, step\n" in text
    assert '"lr": 0.125' in text
    assert 'user_content  {"step": 1, "mask": {"$tensor": "user_content.mask"}}' in text
    rows = {line.split()[0]: line for line in text.splitlines() if "float32 " in line}
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


def test_verify_finds_each_damaged_piece_of_a_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 64)
    save_checkpoint(tmp_path, "1", nn.Linear(12, 5))
    file, start = _place_of(tmp_path / "1", "model.weight")
    content = file.read_bytes()
    for place in range(start, start + 12 * 5 * 4, 8):
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert _run("verify", tmp_path / "1") == 1
        piece = start + (place - start) // 64 * 64
        assert f"model.weight: {file} is damaged: bytes {piece} to " in capsys.readouterr().out
    file.write_bytes(content)
    assert _run("verify", tmp_path / "1") == 0


def test_verify_finds_each_changed_bit_of_a_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A load reads no header, and other programs do."""
    model = nn.Linear(3, 2)
    save_checkpoint(tmp_path, "1", model)
    file, _ = _place_of(tmp_path / "1", "model.weight")
    content = file.read_bytes()
    for place in range(8 + int.from_bytes(content[:8], "little")):
        file.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :])
        assert _run("verify", tmp_path / "1") == 1, place
        first, last = capsys.readouterr().out.splitlines()
        assert first == f"{file} is damaged: its header does not have the tensors of the document."
        assert f"{tmp_path / '1'} is damaged: " in last


def test_verify_names_all_tensors_of_a_truncated_file(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, start = _place_of(copied, "model.model.norm.weight")
    file.write_bytes(file.read_bytes()[: start + 3])
    assert _run("verify", copied) == 1
    text = capsys.readouterr().out
    assert f"model.model.norm.weight: {file} is truncated" in text
    file.unlink()
    assert _run("verify", copied) == 1
    assert f"model.model.norm.weight: {file} is missing, or this host does not share" in capsys.readouterr().out
    file.mkdir()
    assert _run("verify", copied) == 1
    assert "model.model.norm.weight: [Errno" in capsys.readouterr().out


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
    assert f"{tmp_path} has no checkpoint: neither" in capsys.readouterr().err
    assert _run(action, tmp_path / "missing") == 2
    assert "is not a directory" in capsys.readouterr().err


def test_a_training_has_a_line_for_each_checkpoint(saved: Path, tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "training"
    shutil.copytree(saved, path)
    write_sharded_copy(path)
    (path / "step_3").mkdir()
    (path / "step_3" / "0123abcd-rank00000.safetensors").touch()
    assert _run("show", path) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{path / 'step_2'}: checkpoint 2, ")
    assert "\nstep_2        checkpoint 2, " in text
    assert "on the disk, the newest, shown below\n" in text
    assert "\nstep_1        checkpoint 1, " in text
    assert "\nstep_3        unfinished: checkpoint.json is missing\n" in text
    assert "\nstep          1\n" in text

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
    assert _run("verify", path / "step_1", "--all") == 2
    assert "leave --all out" in capsys.readouterr().err
    shutil.rmtree(path / "step_1")
    shutil.rmtree(path / "step_2")
    assert _run("verify", path) == 1
    assert f"{path / 'step_3'} is unfinished" in capsys.readouterr().out


def write_sharded_copy(path: Path) -> None:
    """Save a second checkpoint of the training, with its number."""
    save_checkpoint(path, "step_2", llama(tie_word_embeddings=True), user_content={"step": 1})


def test_json_has_names_and_bytes(saved: Path, capsys: Captured) -> None:
    assert _run("show", saved, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["format"], found["number"], found["step"], found["checkpoints"]) == ("nxdpp", 1, 1, ["step_1"])
    assert found["tensors"]["model.norm.weight"] == {"dtype": "float32", "shape": [32], "bytes": 128}
    assert found["layout"] == {"ranks": 1, "tensor": 1, "data": 1, "pipeline": 1}
    assert found["ties"] == {"lm_head.weight": "model.embed_tokens.weight"}


def test_long_and_hostile_names_lose_nothing(tmp_path: Path, capsys: Captured) -> None:
    long = ".".join(f"module_{number}" for number in range(20))
    model = torch.nn.ModuleDict()
    owner = model
    for part in long.split("."):
        owner[part] = torch.nn.ModuleDict()
        owner = owner[part]  # type: ignore[assignment]  # the annotation of ModuleDict
    owner.register_parameter("[red]x[/red]", torch.nn.Parameter(torch.zeros(1234567, 1, 1)))
    owner.register_parameter("\x1b[31mred", torch.nn.Parameter(torch.zeros(2)))
    save_checkpoint(tmp_path, "one", model)
    assert _run("show", tmp_path) == 0
    text = capsys.readouterr().out
    table = text[text.index("tensor ") :].splitlines()
    assert all(len(line) <= 80 for line in table)
    assert "[1234567, 1, 1]" in text
    assert "4.71 MiB" in text
    assert "\x1b" not in text
    names = "".join(line.split("  ")[0] for line in table)
    assert f"{long}.[red]x[/red]" in names


@pytest.mark.parametrize("columns", ["20", "40", "60"])
def test_a_narrow_terminal_cuts_nothing(
    columns: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Five dimensions are wider than 20 columns, whose lines have one number at least."""
    model = nn.Module()
    model.register_parameter("kernel_of_the_convolution", nn.Parameter(torch.zeros(1024, 1, 16, 1, 16).bfloat16()))
    model.register_parameter("bias", nn.Parameter(torch.zeros(3)))
    save_checkpoint(tmp_path, "one", model)
    monkeypatch.setenv("COLUMNS", columns)

    assert _run("show", tmp_path) == 0

    text = capsys.readouterr().out
    table = text[text.index("\ntensor") + 1 :]
    assert all(len(line) <= int(columns) for line in table.splitlines())
    assert "bfloat16 [1024, 1, 16, 1, 16] 512.00 KiB" in " ".join(table.split())
    assert "float32 [3] 12 B" in " ".join(table.split())
    assert "…" not in text


@pytest.mark.parametrize("change", [{"layout": 3}, {"optimizer": [1]}, {"ties": "x"}])
def test_content_that_no_save_writes_is_damage(change: Any, copied: Path, capsys: Captured) -> None:
    document = parsed_document(copied, read_document(copied))
    metadata = document.metadata
    (copied / DOCUMENT).unlink()
    write_document(copied / DOCUMENT, 1, document.content | change, metadata, metadata.storage_data)
    (name,) = change
    assert _run("show", copied) == 2
    assert f"{DOCUMENT} is damaged (ValueError: its part {name!r} is not as a save writes it" in capsys.readouterr().err


def test_no_checkpoint_and_a_wrong_configuration(tmp_path: Path, capsys: Captured) -> None:
    assert _run("convert", tmp_path, tmp_path / "made", "--to", "nxdpp") == 2
    assert f"{tmp_path} has no checkpoint: neither" in capsys.readouterr().err
    (tmp_path / "pytorch_model.bin").touch()
    assert _run("show", tmp_path) == 2
    assert "is pickled, which is not read" in capsys.readouterr().err
    model = tmp_path / "model"
    llama().save_pretrained(model)
    for fields, text in (({"model_type": "nothing"}, "model_type is 'nothing'"), ({"model_type": None}, "is None")):
        (model / "config.json").write_text(json.dumps({"architectures": 5, **fields}))
        assert _run("show", model) == 0
        assert "model         5\n" in capsys.readouterr().out
        assert _run("convert", model, tmp_path / "made", "--to", "nxdpp") == 2
        printed = capsys.readouterr().err
        assert f"{model}/config.json: " in printed
        assert text in printed


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


LIGHT = """
import sys
from nxdpp.__main__ import main
try:
    main(["checkpoint", "convert", "a", "b", *sys.argv[1:]])
except SystemExit as ended:
    assert ended.code == 2
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize("flags", [["--to", "pickle"], ["--to", "huggingface", "--max-shard-size", "5"]])
def test_a_refused_flag_imports_no_torch(flags: list[str]) -> None:
    subprocess.run([sys.executable, "-c", LIGHT, *flags], check=True, timeout=120, capture_output=True)

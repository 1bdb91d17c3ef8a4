"""Documents that are made by hand: each is refused before anything is changed, read, or allocated."""

import json
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nxdpp.__main__ import main
from nxdpp.checkpoint.distributed import load
from nxdpp.checkpoint.distributed.directory import DOCUMENT
from nxdpp.checkpoint.files.checksummed_reader import DamagedFile
from tests.checkpoint.distributed.small_training import Training, is_same

WEIGHT = "model.0.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hostile") / "saved"
    training = Training()
    training.step()
    training.save(path, "tag")
    return path


@pytest.fixture
def path(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def write(path: Path, document: dict[str, Any]) -> None:
    """Write a document with the checksum that it should have."""
    body = {key: value for key, value in document.items() if key != "checksum"}
    document["checksum"] = f"{zlib.crc32(json.dumps(body, separators=(',', ':')).encode()):08x}"
    (path / "tag" / DOCUMENT).write_text(json.dumps(document))


def set_at(document: Any, place: tuple[Any, ...], value: Any) -> None:
    *path, last = place
    for key in path:
        document = document[key]
    document[last] = value


HOSTILE: list[Any] = [
    None, True, -8, 2**62, 2**80, 1.5, "", "x", "../x", "/etc/passwd", "a\0b", "\ud800", "\x1b[2J", "a" * 300,
    [], [3], [-8, -4], [2**40, 2**40], {}, {"x": 1}, {"$eval": "1"}, {"$tensor": "none"}, {"$tuple": [1]},
    {"$scalar": {"number": 2**70, "dtype": "int8"}}, {"$dtype": "__class__"}, {"$device": "\x1b[2J"}, {"$set": [[]]},
]  # fmt: skip
BLOCK = ("tensors", WEIGHT, "blocks", 0)
OPTIMIZER = ("content", "optimizer")
GROUP = ("content", "optimizer", "groups", 0, "options", "lr")
REFUSED: list[tuple[tuple[Any, ...], Any]] = [
    ((*BLOCK, "start"), 2**62), ((*BLOCK, "sizes"), [2**40, 2**40]), ((*BLOCK, "sizes"), [-8, -4]),
    ((*BLOCK, "offsets"), [4, 0]), ((*BLOCK, "file"), "../x"), ((*BLOCK, "file"), DOCUMENT),
    ((*BLOCK, "checksums"), "zzzzzzzz"), (("tensors", WEIGHT, "shape"), [2**62, 4]),
    (("tensors", WEIGHT, "dtype"), "__class__"), (("tensors", WEIGHT, "blocks"), []), (("tensors",), None),
    (("tensors", "\x1b[2J"), {"dtype": "os", "shape": [], "blocks": []}), (("content",), {}), (("version",), True),
    (("tensors", "user_content.x"), {"dtype": "float32", "shape": [2**44], "blocks": []}),
    (("content", "ties"), {"0.weight": 3}), (("content", "layout"), {"ranks": 2}), (OPTIMIZER, {"class": "AdamW"}),
    ((*OPTIMIZER, "groups"), [{"options": {"params": [1]}, "names": []}]), (GROUP, {"$eval": "1"}),
    ((*OPTIMIZER, "states"), {"0.weight": {"exp_avg": 3}}), (("content", "scheduler"), {"$eval": "1"}),
    ((*OPTIMIZER, "states", "0.weight", "exp_avg", "shape"), [2**40]), (("content", "random"), [{}]),
    *((("content", "user_content"), value) for value in HOSTILE[-7:] if "$tuple" not in value),
]  # fmt: skip


def test_a_document_that_no_save_writes_is_refused(path: Path) -> None:
    text = (path / "tag" / DOCUMENT).read_text()
    for place, value in REFUSED:
        document = json.loads(text)
        set_at(document, place, value)
        write(path, document)
        check_refused(path)


def test_blocks_that_overlap_or_leave_a_hole_are_refused(path: Path) -> None:
    text = (path / "tag" / DOCUMENT).read_text()
    for second in ([0, 0], [2, 0], [5, 0]):
        document = json.loads(text)
        one = {**document["tensors"][WEIGHT]["blocks"][0], "sizes": [4, 4]}
        document["tensors"][WEIGHT]["blocks"] = [one, {**one, "offsets": second}]
        write(path, document)
        check_refused(path)


def places_in(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """All places in a value of JSON but the whole."""
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield (*place, key)
        yield from places_in(each, (*place, key))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(draw=st.data(), value=st.sampled_from(HOSTILE))
def test_any_value_at_any_place_is_taken_or_refused(saved: Path, draw: st.DataObject, value: Any) -> None:
    """A refused load has changed nothing, or says that it has; another error than the refusal does not come."""
    file = saved / "tag" / DOCUMENT
    text = file.read_text()
    document = json.loads(text)
    set_at(document, draw.draw(st.sampled_from(sorted(places_in(document), key=str))), value)
    training = Training()
    before, drawn = training.state(), torch.get_rng_state()
    refusal = ""
    notes: list[str] = []
    try:
        write(saved, document)
        training.load(saved, "tag")
    except ValueError as error:
        refusal, notes = str(error), getattr(error, "__notes__", [])
    finally:
        file.write_text(text)
        after = torch.get_rng_state()
        torch.set_rng_state(drawn)
    if refusal:
        assert refusal.isprintable(), "a terminal obeys nothing of it"
        if notes != [load.MIXED]:
            assert is_same(training.state(), before)
            assert torch.equal(after, drawn)


def check_refused(path: Path) -> None:
    assert main(["checkpoint", "verify", str(path / "tag")]) in (1, 2)
    training = Training()
    before, drawn, files = training.state(), torch.get_rng_state(), sorted(path.parent.rglob("*"))
    with pytest.raises(ValueError, match=str(path)) as caught:
        training.load(path, "tag")
    assert str(caught.value).isprintable(), "a terminal obeys nothing of it"
    assert is_same(training.state(), before)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert sorted(path.parent.rglob("*")) == files


def test_a_tensor_that_is_larger_than_its_file_is_not_allocated(path: Path) -> None:
    document = json.loads((path / "tag" / DOCUMENT).read_text())
    size = 2**36
    one = {**document["tensors"][WEIGHT]["blocks"][0], "offsets": [0], "sizes": [size]}
    one["checksums"] = "0" * 8 * (size // 2**23)
    document["tensors"]["user_content.x"] = {"dtype": "uint8", "shape": [size], "blocks": [one]}
    write(path, document)
    with pytest.raises(DamagedFile, match=r"is truncated: it has \d+ bytes"):
        Training().load(path, "tag")


def test_a_document_of_many_levels_is_refused(path: Path) -> None:
    text = (path / "tag" / DOCUMENT).read_text()
    for value in ("[" * 100_000 + "]" * 100_000, '{"a":' * 2_000 + "1" + "}" * 2_000):
        changed = text.replace('"user_content": {', f'"more": {value}, "user_content": {{', 1)
        (path / "tag" / DOCUMENT).write_text(changed)
        check_refused(path)


def test_a_pipe_a_device_or_a_directory_is_no_file_of_a_checkpoint(path: Path) -> None:
    for file in (next((path / "tag").glob("*.safetensors")), path / "tag" / DOCUMENT):
        content = file.read_bytes()
        file.unlink()
        os.mkfifo(file)
        check_refused(path)
        file.unlink()
        file.mkdir()
        check_refused(path)
        file.rmdir()
        file.symlink_to("/dev/zero")
        check_refused(path)
        file.unlink()
        file.write_bytes(content)


def test_latest_names_a_checkpoint_of_the_directory_alone(path: Path) -> None:
    for text in ("../copy/tag", "/etc", "a\0", "x" * 10_000, "", "..", "tag/../tag"):
        (path / "latest").write_text(text)
        assert Training().load(path) == {"tag": "tag"}
    (path / "latest").unlink()
    os.mkfifo(path / "latest")
    assert Training().load(path) == {"tag": "tag"}

"""Documents that are made by hand: each is refused before anything is changed, read, or allocated."""

import json
import os
import shutil
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nxdpp.__main__ import main
from nxdpp.checkpoint.distributed.directory import DOCUMENT
from nxdpp.checkpoint.distributed.document_checks import metadata_of
from nxdpp.checkpoint.files.checksummed_reader import DamagedFile
from tests.checkpoint.distributed.small_training import Training, is_same

WEIGHT = "model.0.weight"
Change = Callable[[dict[str, Any]], object]


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


def block(**values: Any) -> Change:
    return lambda document: document["tensors"][WEIGHT]["blocks"][0].update(values)


def tensor(name: str = WEIGHT, **values: Any) -> Change:
    return lambda document: document["tensors"].setdefault(name, {}).update(values)


def content(**values: Any) -> Change:
    return lambda document: document["content"].update(values)


def optimizer(**values: Any) -> Change:
    return lambda document: document["content"]["optimizer"].update(values)


def state(key: str, **values: Any) -> Change:
    return lambda document: document["content"]["optimizer"]["states"]["0.weight"][key].update(values)


def random(**values: Any) -> Change:
    return lambda document: document["content"]["random"][0].update(values)


def top(**values: Any) -> Change:
    return lambda document: document.update(values)


def each(change: Callable[..., Change], name: str, *values: Any) -> list[Change]:
    """The change of ``name`` to each of ``values``."""
    return [change(**{name: value}) for value in values]


def again(**values: Any) -> Change:
    """Add the block of a tensor a second time, with other values."""

    def change(document: dict[str, Any]) -> None:
        blocks = document["tensors"][WEIGHT]["blocks"]
        blocks.append({**blocks[0], **values})

    return change


def halves(second: list[int]) -> Change:
    """Two blocks of half of the tensor."""

    def change(document: dict[str, Any]) -> None:
        one = {**document["tensors"][WEIGHT]["blocks"][0], "sizes": [4, 4]}
        document["tensors"][WEIGHT]["blocks"] = [one, {**one, "offsets": second}]

    return change


HUGE: dict[str, Any] = {"dtype": "float32", "shape": [2**44]}
OF_HUGE = {"offsets": [0], "sizes": [2**44], "file": "a.safetensors", "start": 0, "checksums": "0" * 8 * 2**23}

CHANGES: list[Change] = [
    *each(block, "start", -8, 2**62, 2**80, "8", 1.5, None, True),
    *each(block, "sizes", [2**40, 2**40], [-8, 4], [-8, -4], [32], ["8", 4], [2**70, 4], None, [True, 4]),
    *each(block, "offsets", [-4, 0], [4, 0], [0], "00", [0.0, 0]),
    *each(block, "file", "../x", "/etc/passwd", "a\0b", 3, ".", "", "\ud800", "a" * 300, DOCUMENT, "none"),
    *each(block, "checksums", "-0000001", "\uff11" * 8, "zzzzzzzz", [1], "", None),
    *each(tensor, "shape", [-8, 4], [2**62, 4], "84", None, [8, 4, 1]),
    *each(tensor, "dtype", ["float32"], "os", "quint8", "bits8", "__class__", None),
    *each(tensor, "blocks", {}, [], "abc", None, [3]),
    again(), again(offsets=[4, 0]), halves([0, 0]), halves([2, 0]), halves([5, 0]),
    *each(top, "tensors", [], None, 3, {WEIGHT: 3}),
    *each(top, "content", [], None, {}, "text"),
    *each(top, "number", "x", None, 1.5),
    *each(top, "version", True, 1.0, [1], "1"),
    *each(content, "ties", [], "x", {"0.weight": 3}), *each(content, "quantized", [], "x", {"0.weight": 3}),
    content(layout=3), content(layout={"ranks": 2}), content(layout={"ranks": 1}), content(configuration=[1]),
    *each(content, "optimizer", [], {}, 3, {"class": "AdamW"}),
    *each(optimizer, "groups", 3, [3], [{"options": {}, "names": [], "x": 1}]),
    optimizer(groups=[{"options": {"params": [1]}, "names": []}]),
    optimizer(groups=[{"options": {"lr": {"$eval": "1"}}, "names": []}]),
    tensor("\x1b[2J", dtype="os", shape=[], blocks=[]),
    *each(optimizer, "states", None, {"0.weight": "exp"}, {"0.weight": {"exp_avg": 3}}),
    optimizer(states={"0.weight": {"more": {"tensor": "float32"}}}),
    state("exp_avg", shape=[2**40]), state("exp_avg", tensor="load"),
    state("step", number="x"), state("step", number=[1]),
    *each(content, "random", None, [], [3], [{}]),
    random(torch={"$tensor": WEIGHT, "x": 1}), random(python={"$tuple": [3, {"$bytes": ""}, None]}), random(numpy=[]),
    *each(content, "scheduler", [], 3, {"$tuple": [1]}, {"$eval": "1"}),
    *each(content, "user_content",
        {"$eval": "1"}, {"$tensor": "none"}, {"$tensor": []}, {"$scalar": {"number": 1, "dtype": "hub"}},
        {"$scalar": 3},
        {"$float": "x"}, {"$float": []}, {"$bytes": "\u00e9"}, {"$dict": [1]}, {"$dict": [[[], 1]]}, {"$set": [[]]},
        {"$counter": 3}, {"$size": ["a"]}, {"$device": "cuda:x"}, {"$device": 3}, {"$dtype": "__class__"},
        {"$dtype": 3}, {"$tuple": [1], "x": 2}, {"$device": "\x1b[2J"}, {"$tensor": "random.0.torch"},
        {"$scalar": {"number": 2**70, "dtype": "int8"}},
    ),
    lambda document: document["content"].pop("user_content"),
    tensor("user_content.x", **HUGE, blocks=[]),
    tensor("user_content.x", **HUGE, blocks=[{**OF_HUGE, "checksums": ""}]),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_a_document_that_no_save_writes_is_refused(number: int, path: Path) -> None:
    document = json.loads((path / "tag" / DOCUMENT).read_text())
    CHANGES[number](document)
    write(path, document)
    check_refused(path)


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


@pytest.mark.parametrize("name", [DOCUMENT, "values"])
def test_a_pipe_a_device_or_a_directory_is_no_file_of_a_checkpoint(name: str, path: Path) -> None:
    file = next((path / "tag").glob("*.safetensors")) if name == "values" else path / "tag" / name
    file.unlink()
    os.mkfifo(file)
    check_refused(path)
    file.unlink()
    file.mkdir()
    check_refused(path)
    file.rmdir()
    file.symlink_to("/dev/zero")
    check_refused(path)


@pytest.mark.parametrize("text", ["../copy/tag", "/etc", "a\0", "x" * 10_000, "", "..", "tag/../tag"])
def test_latest_names_a_checkpoint_of_the_directory_alone(text: str, path: Path) -> None:
    (path / "latest").write_text(text)
    assert Training().load(path) == {"tag": "tag"}


def test_latest_is_read_from_a_file_alone(path: Path) -> None:
    (path / "latest").unlink()
    os.mkfifo(path / "latest")
    assert Training().load(path) == {"tag": "tag"}


def test_texts_of_a_document_are_escaped_in_messages(path: Path) -> None:
    document = json.loads((path / "tag" / DOCUMENT).read_text())
    document["content"]["optimizer"]["class"] = "\x1b[2J"
    document["content"]["optimizer"]["groups"][0]["names"][0] = "\x1b[3J"
    write(path, document)
    for strict in (True, False):
        with pytest.raises(ValueError, match=r"\\x1b\[2J") as caught:
            Training().load(path, "tag", strict)
        assert str(caught.value).isprintable()
    document["content"]["optimizer"]["class"] = "AdamW"
    write(path, document)
    with pytest.raises(ValueError, match="param_groups") as caught:
        Training().load(path, "tag")
    assert str(caught.value).isprintable()


def test_many_blocks_that_overlap_are_refused_soon(path: Path) -> None:
    """As many that do not overlap are read."""
    document = json.loads((path / "tag" / DOCUMENT).read_text())
    count = 20_000
    one = {**document["tensors"][WEIGHT]["blocks"][0], "sizes": [1, 1], "checksums": "0" * 8}
    begin = time.process_time()
    for last in (count - 1, count - 2):
        blocks = [{**one, "sizes": [2, 1], "offsets": [0, place]} for place in (*range(count - 1), last)]
        tensor = {"dtype": "uint8", "shape": [2, count], "blocks": blocks}
        if last == count - 1:
            metadata_of({"name": tensor})
        else:
            with pytest.raises(ValueError, match="do not have each element of"):
                metadata_of({"name": tensor})
    assert time.process_time() - begin < 10

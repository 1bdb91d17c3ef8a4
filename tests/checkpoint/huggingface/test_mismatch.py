"""Directories without a checkpoint of the model: the error names what is wrong, and nothing is changed."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from nxdpp import NxDPPModel, load_pretrained
from nxdpp.checkpoint.files.safetensors_reader import OpenFile, read_header
from nxdpp.checkpoint.huggingface.file_tensors import FileTensors
from nxdpp.pipeline.local import half_loaded
from tests.checkpoint.huggingface.checkpointed_models import differing, make, on_meta, saved_by_transformers, wrap_as

INDEX = "model.safetensors.index.json"
Tensors = dict[str, torch.Tensor]


@cache
def first_rank(name: str) -> tuple[NxDPPModel, NxDPPModel]:
    """The first stage of two, with values and without. Refused loads do not change them."""
    return wrap_as(0, 2, make(name, seed=5)), wrap_as(0, 2, on_meta(name))


def refusal(folder: Path, name: str = "llama") -> str:
    """The error of a rank that loads ``folder``, equal for real and for meta models."""
    real, empty = first_rank(name)
    before = {key: tensor.clone() for key, tensor in real.local_state_dict().items()}
    messages = []
    for model in (real, empty):
        with pytest.raises(ValueError, match=r"\S") as caught:
            load_pretrained(model, folder)
        messages.append(str(caught.value))
    assert differing(real.local_state_dict(), before) == []
    assert all(parameter.is_meta for parameter in empty.local_parameters())
    assert messages[0] == messages[1]
    return messages[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    for name in ("llama", "tied_llama", "mixtral"):
        saved_by_transformers(name, folder / name)
    saved_by_transformers("llama", folder / "sharded", max_shard_size="40KB")
    assert len(list((folder / "sharded").glob("model-*-of-*.safetensors"))) > 2
    return folder


@pytest.fixture
def single(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved / "llama", tmp_path / "single"))


@pytest.fixture
def sharded(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved / "sharded", tmp_path / "sharded"))


def last_of(folder: Path) -> Path:
    """The file of the last layer and the head, which the first rank does not need."""
    return max(folder.glob("model-*-of-*.safetensors"))


def rewrite(folder: Path, change: Callable[[Tensors], Any]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def test_all_mismatches_are_in_one_error(single: Path) -> None:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".layers.1." in name or ".layers.2." in name]:
            del tensors[name]
        for name in ("model.layers.0.extra", "\x1b[31mred\x07\n", "a" * 100_000):
            tensors[name] = torch.zeros(1)
        tensors["model.norm.weight"] = torch.zeros(3)
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int32)

    rewrite(single, change)
    message = refusal(single)

    head = f"{single} are not those of this LlamaForCausalLM: 18 missing, 3 unexpected, 1 of another shape"
    assert head in message
    assert "and 8 more" in message
    assert "unexpected: " in message
    assert "model.layers.0.extra" in message
    assert "model.norm.weight ([3] in the checkpoint, [32] in the model)" in message
    assert "lm_head.weight (torch.int32 in the checkpoint, torch.float32 in the model)" in message
    assert "Nothing was loaded" in message
    # Names are escaped and cut.
    assert "\\x1b[31mred\\x07\\n" in message
    assert "\x1b" not in message
    assert "a... (100,000 characters)" in message
    assert len(message) < 2500


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.floats(0.0, 0.999))
def test_each_truncation_of_a_file_is_named(saved: Path, part: float) -> None:
    last = last_of(saved / "sharded")
    whole = last.read_bytes()
    try:
        last.write_bytes(whole[: int(part * len(whole))])
        message = refusal(saved / "sharded")
        size = last.stat().st_size
    finally:
        last.write_bytes(whole)
    assert f"{last} is truncated or corrupt" in message
    assert f"it has {size} bytes. Copy or download it again." in message


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.floats(0.0, 0.999), st.integers(1, 255))
def test_a_changed_header_is_refused_or_gives_the_same_values(saved: Path, part: float, change: int) -> None:
    file = saved / "llama" / "model.safetensors"
    whole = file.read_bytes()
    place = int(part * (8 + int.from_bytes(whole[:8], "little")))
    real, _ = first_rank("llama")
    before = {name: tensor.clone() for name, tensor in real.local_state_dict().items()}
    try:
        file.write_bytes(whole[:place] + bytes([whole[place] ^ change]) + whole[place + 1 :])
        try:
            load_pretrained(real, saved / "llama")
            expected = make("llama").state_dict()
        except ValueError:
            expected = before
        assert differing(real.local_state_dict(), expected) == []
    finally:
        file.write_bytes(whole)
        real.load_local_state_dict(before)


def test_a_file_changed_during_the_load(single: Path) -> None:
    file = single / "model.safetensors"
    stored = read_header(file, OpenFile())["model.norm.weight"]
    save_file({"model.norm.weight": torch.zeros(32)}, file)

    with pytest.raises(OSError, match=rf"{file} was changed before all its tensors were read: load again"):
        stored.read(torch.float32)


def test_a_load_that_failed_midway_is_remembered_until_one_succeeds(
    single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wrap_as(0, 2, make("llama", seed=5))
    fill = FileTensors.fill

    def failing(self: FileTensors, conversion: Any, tensors: Any) -> None:
        fill(self, conversion, tensors)
        raise OSError("the file was changed")

    with monkeypatch.context() as patch:
        patch.setattr(FileTensors, "fill", failing)
        with pytest.raises(OSError, match="the file was changed"):
            load_pretrained(model, single)
    failed = rf"{single} failed midway \(OSError: the file was changed\)\. Values are of"
    with pytest.raises(RuntimeError, match=failed):
        half_loaded.check_whole(model.local_module)
    part = tmp_path / "part"
    part.mkdir()
    name, tensor = next(iter(load_file(single / "model.safetensors").items()))
    save_file({name: tensor}, part / "model.safetensors")
    load_pretrained(model, part, strict=False)
    with pytest.raises(RuntimeError, match="failed midway"):
        half_loaded.check_whole(model.local_module)
    load_pretrained(model, single)
    half_loaded.check_whole(model.local_module)


def _without_a_tensor(folder: Path) -> None:
    content = json.loads((folder / INDEX).read_text())
    files = content["weight_map"]
    files["lm_head.weight"] = next(file for file in files.values() if file != files["lm_head.weight"])
    (folder / INDEX).write_text(json.dumps(content))


def _elsewhere(folder: Path) -> None:
    content = json.loads((folder / INDEX).read_text())
    content["weight_map"]["lm_head.weight"] = "../model.safetensors"
    (folder / INDEX).write_text(json.dumps(content))


def _index(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / INDEX).write_text(text)


INDEXES: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: last_of(folder).unlink(), f"{INDEX} names model-"),
    (_without_a_tensor, "lacks 1 tensor of"),
    (_elsewhere, "names ../model.safetensors, which is not a file beside it"),
    (_index('{"weight_map": {"a": 1}}'), f"{INDEX} is corrupt"),
    (_index("[" * 100_000), f"{INDEX} is corrupt (RecursionError"),
]


def test_a_damaged_index_is_named(saved: Path, tmp_path: Path) -> None:
    for number, (damage, text) in enumerate(INDEXES):
        folder = Path(shutil.copytree(saved / "sharded", tmp_path / str(number)))
        damage(folder)
        assert text in refusal(folder), number


def test_floats_of_other_widths_are_converted_when_asked(single: Path) -> None:
    expected = {name: tensor.bfloat16() for name, tensor in make("llama").state_dict().items()}
    rewrite(single, lambda tensors: tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()}))
    message = refusal(single)

    assert "0 of another shape, 39 of another float width.\n" in message
    assert "lm_head.weight (torch.bfloat16 in the checkpoint, torch.float32 in the model)" in message
    # Both remedies of the message.
    model = wrap_as(0, 2, make("llama", seed=5))
    load_pretrained(model, single, convert_dtype=True)
    assert differing(model.local_state_dict(), {name: tensor.float() for name, tensor in expected.items()}) == []
    model = wrap_as(0, 2, make("llama", seed=5).to(torch.bfloat16))
    load_pretrained(model, single)
    assert differing(model.local_state_dict(), expected) == []


def test_values_that_are_not_a_number(single: Path) -> None:
    name = "model.layers.3.mlp.up_proj.weight"

    def change(tensors: Tensors) -> None:
        # Infinities are numbers.
        tensors["lm_head.weight"][0] = torch.tensor([torch.inf, -torch.inf]).repeat(16)
        tensors.update({key: tensor.bfloat16() for key, tensor in tensors.items()})
        tensors[name][2, 3] = torch.nan

    rewrite(single, change)
    real = wrap_as(1, 2, make("llama", seed=5))
    before = {key: tensor.clone() for key, tensor in real.local_state_dict().items()}
    with pytest.raises(ValueError, match=rf"{name} in {single}/model.safetensors has values that are not a number"):
        load_pretrained(real, single, convert_dtype=True)
    assert differing(real.local_state_dict(), before) == []
    # The remedy of the message, and a rank without the layer.
    stored = load_file(single / "model.safetensors")
    real.load_local_state_dict({key: stored[key].float() for key in real.local_state_dict()})
    assert real.local_state_dict()[name].isnan().sum() == 1
    load_pretrained(wrap_as(0, 2, make("llama", seed=5)), single, convert_dtype=True)


def test_a_tied_weight_of_two_values(saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved / "tied_llama", tmp_path / "tied"))
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}))

    assert "model.embed_tokens.weight and lm_head.weight are one tied weight in this LlamaForCausalLM" in refusal(
        folder, "tied_llama"
    )

"""Directories without a checkpoint of the model: every rank raises the same error and changes nothing."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from nxdpp import NxDPPModel, load_pretrained, parallel_state
from nxdpp.checkpoint.files.safetensors_reader import OpenFile, read_header
from nxdpp.checkpoint.huggingface.file_tensors import FileTensors
from nxdpp.pipeline.local import half_loaded
from tests.checkpoint.huggingface.checkpointed_models import differing, make, on_meta, saved_by_transformers

RANKS = 2


@pytest.fixture(autouse=True)
def no_groups_left() -> Iterator[None]:
    yield
    parallel_state.destroy_model_parallel()


def wrap_as(rank: int, model: nn.Module) -> NxDPPModel:
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_debug(pipeline_model_parallel_rank=rank, pipeline_model_parallel_size=RANKS)
    return NxDPPModel(model, num_microbatches=RANKS)


def refusal(folder: Path, name: str = "llama") -> str:
    """The error of every rank that loads ``folder``, equal for real and for meta models."""
    messages = set()
    for rank in range(RANKS):
        real = wrap_as(rank, make(name, seed=5))
        before = {key: tensor.clone() for key, tensor in real.local_state_dict().items()}
        with pytest.raises(ValueError, match=r"\S") as caught:
            load_pretrained(real, folder)
        messages.add(str(caught.value))
        assert differing(real.local_state_dict(), before) == []
        empty = wrap_as(rank, on_meta(name))
        with pytest.raises(ValueError, match=r"\S") as caught:
            load_pretrained(empty, folder)
        messages.add(str(caught.value))
        assert all(parameter.is_meta for parameter in empty.local_parameters())
    (message,) = messages
    return message


@pytest.fixture
def single(tmp_path: Path) -> Path:
    saved_by_transformers("llama", tmp_path)
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    saved_by_transformers("llama", tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
    return tmp_path


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def test_all_mismatches_are_in_one_error(single: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("model.embed_tokens.weight", "model.layers.3.mlp.up_proj.weight"):
            del tensors[name]
        tensors["model.layers.0.extra"] = torch.zeros(1)
        tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(1)
        tensors["model.norm.weight"] = torch.zeros(3)
        tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(2, 2)

    rewrite(single, change)
    message = refusal(single)

    assert f"{single} are not those of this LlamaForCausalLM: 2 missing, 2 unexpected, 2 of another shape" in message
    assert "missing: model.embed_tokens.weight, model.layers.3.mlp.up_proj.weight\n" in message
    assert "unexpected: model.layers.0.extra, model.layers.9.mlp.up_proj.weight\n" in message
    assert "model.norm.weight ([3] in the checkpoint, [32] in the model)" in message
    assert "model.layers.0.mlp.down_proj.weight ([2, 2] in" in message
    assert "Nothing was loaded" in message


def test_a_long_list_is_shortened(single: Path) -> None:
    rewrite(single, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".layers." in name])
    message = refusal(single)

    assert "36 missing, 0 unexpected, 0 of another shape" in message
    assert "and 26 more" in message
    assert len(message) < 1200


def test_experts_that_cannot_be_merged_are_named(tmp_path: Path) -> None:
    saved_by_transformers("mixtral", tmp_path)
    name = "model.layers.3.block_sparse_moe.experts.1.w1.weight"
    assert name in load_file(tmp_path / "model.safetensors")
    rewrite(tmp_path, lambda tensors: tensors.update({name: torch.zeros(3, 5)}))

    message = refusal(tmp_path, "mixtral")
    assert "0 missing, 0 unexpected, 1 of another shape" in message
    assert "model.layers.3.mlp.experts.gate_up_proj (cannot be made of" in message
    assert f"{name} [3, 5]" in message


def test_a_missing_expert_is_another_shape(tmp_path: Path) -> None:
    saved_by_transformers("mixtral", tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.pop("model.layers.0.block_sparse_moe.experts.3.w2.weight"))

    assert "model.layers.0.mlp.experts.down_proj ([3, 32, 48] in the checkpoint, [4, 32, 48]" in refusal(
        tmp_path, "mixtral"
    )


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content: content[:-1], "not fully covered"),
        (lambda content: content + b"\0", "not fully covered"),
        (lambda content: content[:100], "header"),
        (lambda content: b"", "header"),
        (lambda content: content[:8] + b"#" + content[9:], "header"),
        (lambda content: b"\xff" * 8 + content[8:], "header"),
    ],
)
def test_a_damaged_file_is_named(sharded: Path, damage: Callable[[bytes], bytes], reason: str) -> None:
    # The file of the last layer and the head, which the first rank does not need.
    last = max(sharded.glob("model-*-of-*.safetensors"))
    last.write_bytes(damage(last.read_bytes()))
    message = refusal(sharded)

    assert f"{last} is truncated or corrupt" in message
    assert reason in message
    assert f"it has {last.stat().st_size} bytes. Copy or download it again." in message


@pytest.mark.parametrize(
    "change",
    [
        lambda file: file.write_bytes(file.read_bytes()[:-4]),
        lambda file: save_file({"model.norm.weight": torch.zeros(32)}, file),
        lambda file: os.utime(file, ns=(1, 1)),
    ],
)
def test_a_file_changed_during_the_load(single: Path, change: Callable[[Path], object]) -> None:
    file = single / "model.safetensors"
    stored = read_header(file, OpenFile())["model.norm.weight"]
    change(file)

    with pytest.raises(OSError, match=rf"{file} was changed before all its tensors were read: load again"):
        stored.read(torch.float32)


def test_a_load_that_failed_midway_is_remembered_until_one_succeeds(
    single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wrap_as(0, make("llama", seed=5))
    fill = FileTensors.fill

    def failing(self: FileTensors, conversion: Any, tensors: Any) -> None:
        fill(self, conversion, tensors)
        raise OSError("the file was changed")

    with monkeypatch.context() as patch:
        patch.setattr(FileTensors, "fill", failing)
        with pytest.raises(OSError, match="the file was changed"):
            load_pretrained(model, single)
    with pytest.raises(
        RuntimeError, match=rf"{single} failed midway \(OSError: the file was changed\)\. Values are of"
    ):
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


@pytest.mark.parametrize(("dtype", "bytes_each"), [("F6_E2M3", 0.75), ("F4", 0.5)])
def test_a_dtype_that_torch_does_not_convert(sharded: Path, dtype: str, bytes_each: float) -> None:
    last = max(sharded.glob("model-*-of-*.safetensors"))
    tensors = load_file(last)
    entries, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + int(tensor.numel() * bytes_each)
        entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    last.write_bytes(len(header).to_bytes(8, "little") + header + bytes(end))

    assert f"{next(iter(tensors))} in {last} has the dtype {dtype}, which cannot be loaded" in refusal(sharded)


def test_an_index_with_a_missing_file(sharded: Path) -> None:
    last = max(sharded.glob("model-*-of-*.safetensors"))
    last.unlink()

    assert f"model.safetensors.index.json names {last.name}, which does not exist" in refusal(sharded)


def test_an_index_with_a_missing_tensor(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    other = next(file for file in content["weight_map"].values() if file != content["weight_map"]["lm_head.weight"])
    content["weight_map"]["lm_head.weight"] = other
    index.write_text(json.dumps(content))

    assert f"{sharded / other} lacks 1 tensor of" in refusal(sharded)
    assert "lm_head.weight" in refusal(sharded)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_a_damaged_index_is_named(sharded: Path, content: str) -> None:
    index = sharded / "model.safetensors.index.json"
    index.write_text(content)

    assert f"{index} is corrupt" in refusal(sharded)


@pytest.mark.parametrize("file", ["model.safetensors.index.json", "config.json"])
def test_json_that_is_nested_too_deeply(sharded: Path, file: str) -> None:
    (sharded / file).write_text("[" * 100_000)

    assert f"{sharded / file} is corrupt (RecursionError" in refusal(sharded)


@pytest.mark.parametrize("name", ["other.safetensors", "../model.safetensors.index.json"])
def test_weights_that_the_configuration_names(sharded: Path, name: str) -> None:
    config = sharded / "config.json"
    fields = json.loads(config.read_text())
    config.write_text(json.dumps({**fields, "transformers_weights": name}))
    assert f"{config} names '{name}' as its weights (transformers_weights), which is not a file" in refusal(sharded)
    shutil.move(sharded / "model.safetensors.index.json", sharded / "own.safetensors.index.json")
    config.write_text(json.dumps({**fields, "transformers_weights": "own.safetensors.index.json"}))

    model = wrap_as(0, make("llama", seed=5))
    load_pretrained(model, sharded)
    assert differing(model.local_state_dict(), make("llama").state_dict()) == []


DTYPES = [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn]


def test_tensors_of_another_kind_of_dtype(single: Path) -> None:
    names = ["model.norm.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight", "model.embed_tokens.weight"]

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name, dtype in zip(names, DTYPES, strict=True):
            tensors[name] = tensors[name].to(dtype)

    rewrite(single, change)
    message = refusal(single)

    assert "0 missing, 0 unexpected, 0 of another shape, 4 of another dtype." in message
    for name, dtype in zip(names, DTYPES, strict=True):
        assert f"{name} ({dtype} in the checkpoint, torch.float32 in the model)" in message
    assert "convert them in the files" in message
    # The remedy of the message.
    rewrite(single, lambda tensors: tensors.update({name: tensors[name].to(torch.float32) for name in names}))
    load_pretrained(wrap_as(0, make("llama")), single)


def test_floats_of_other_widths_are_converted_when_asked(single: Path) -> None:
    expected = {name: tensor.bfloat16() for name, tensor in make("llama").state_dict().items()}
    rewrite(single, lambda tensors: tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()}))
    message = refusal(single)

    assert "0 of another shape, 39 of another float width.\n" in message
    assert "lm_head.weight (torch.bfloat16 in the checkpoint, torch.float32 in the model)" in message
    # Both remedies of the message.
    model = wrap_as(0, make("llama", seed=5))
    load_pretrained(model, single, convert_dtype=True)
    assert differing(model.local_state_dict(), {name: tensor.float() for name, tensor in expected.items()}) == []
    model = wrap_as(0, make("llama", seed=5).to(torch.bfloat16))
    load_pretrained(model, single)
    assert differing(model.local_state_dict(), expected) == []


class Counting(nn.Module):
    """A module with tensors of other kinds than floats."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("steps", torch.tensor(3.5), torch.tensor(4, dtype=torch.int32)),
        ("mask", torch.ones(2, dtype=torch.int64), None),
    ],
)
def test_kinds_of_buffers(name: str, wrong: torch.Tensor, right: torch.Tensor | None, tmp_path: Path) -> None:
    parallel_state.initialize_debug(pipeline_model_parallel_rank=0, pipeline_model_parallel_size=1)
    model = NxDPPModel(Counting(), transformer_layer_cls=nn.Linear)
    save_file({**Counting().state_dict(), name: wrong}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"1 of another dtype.\n  of another dtype: {name} \({wrong.dtype} in"):
        load_pretrained(model, tmp_path)
    if right is not None:
        save_file({**Counting().state_dict(), name: right}, tmp_path / "model.safetensors")
        load_pretrained(model, tmp_path)
        assert model.local_state_dict()[name].item() == right.item()


@pytest.mark.parametrize("width", [torch.float32, torch.bfloat16])
def test_values_that_are_not_a_number(single: Path, width: torch.dtype) -> None:
    name = "model.layers.3.mlp.up_proj.weight"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        # Infinities are numbers.
        tensors["lm_head.weight"][0] = torch.tensor([torch.inf, -torch.inf]).repeat(16)
        tensors.update({key: tensor.to(width) for key, tensor in tensors.items()})
        tensors[name][2, 3] = torch.nan

    rewrite(single, change)
    for model in (make("llama", seed=5), on_meta("llama")):
        wrapped = wrap_as(1, model)
        before = {key: tensor.clone() for key, tensor in wrapped.local_state_dict().items() if not tensor.is_meta}
        with pytest.raises(ValueError, match=rf"{name} in {single}/model.safetensors has values that are not a number"):
            load_pretrained(wrapped, single, convert_dtype=True)
        if before:
            assert differing(wrapped.local_state_dict(), before) == []
        else:
            assert all(parameter.is_meta for parameter in wrapped.local_parameters())
    # A rank without the layer loads, and so does the remedy of the message.
    load_pretrained(wrap_as(0, make("llama", seed=5)), single, convert_dtype=True)
    real = wrap_as(1, make("llama", seed=5))
    stored = load_file(single / "model.safetensors")
    real.load_local_state_dict({key: stored[key] for key in real.local_state_dict()})
    assert real.local_state_dict()[name].isnan().sum() == 1


def test_names_are_shown_escaped_and_cut(single: Path) -> None:
    names = ["\x1b[31mred\x07\n", "a" * 100_000]
    rewrite(single, lambda tensors: tensors.update({name: torch.zeros(1) for name in names}))
    message = refusal(single)

    assert "unexpected: " in message
    assert "\\x1b[31mred\\x07\\n" in message
    assert "\x1b" not in message
    assert "a... (100,000 characters)" in message
    assert len(message) < 1500


def test_no_directory(tmp_path: Path) -> None:
    message = refusal(tmp_path / "none")

    assert f"{tmp_path / 'none'} is not a directory" in message
    assert "snapshot_download" in message


def test_a_directory_without_weights(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")

    assert "has neither model.safetensors nor model.safetensors.index.json, but notes.txt" in refusal(tmp_path)


def test_pickled_weights_only(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "pytorch_model.bin")
    message = refusal(tmp_path)

    assert f"{tmp_path / 'pytorch_model.bin'} is pickled, which is not read" in message
    assert ".save_pretrained(DIRECTORY)" in message


def test_a_tied_weight_of_two_values(tmp_path: Path) -> None:
    saved_by_transformers("tied_llama", tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}))
    message = refusal(tmp_path, "tied_llama")

    assert "model.embed_tokens.weight and lm_head.weight are one tied weight in this LlamaForCausalLM" in message
    assert "tie_word_embeddings=False" in message


def test_an_unwrapped_model_is_refused(single: Path) -> None:
    unwrapped: Any = make("llama")
    with pytest.raises(TypeError, match=r"load_pretrained is for an NxDPPModel, not for a LlamaForCausalLM"):
        load_pretrained(unwrapped, single)


class Remembering(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"steps": 1}

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("nothing is loaded")


def test_extra_state_is_refused(single: Path) -> None:
    model = make("llama")
    model.model.layers[0].mlp.up_proj = Remembering(32, 64, bias=False)
    wrapped = wrap_as(1, model)

    with pytest.raises(ValueError, match=r"model.layers.0.mlp.up_proj._extra_state is extra state"):
        load_pretrained(wrapped, single)


def test_files_outside_the_index_are_not_read(sharded: Path, tmp_path: Path) -> None:
    """A directory with left-over files of a larger model."""
    shutil.copy(max(sharded.glob("model-*-of-*.safetensors")), sharded / "model-00099-of-00099.safetensors")
    (sharded / "model-00098-of-00099.safetensors").write_bytes(b"")
    model = wrap_as(0, make("llama", seed=5))
    load_pretrained(model, sharded)

    assert differing(model.local_state_dict(), make("llama").state_dict()) == []


@pytest.mark.parametrize("elsewhere", ["../model.safetensors", "/tmp/model.safetensors"])
def test_an_index_with_a_file_in_another_directory(sharded: Path, elsewhere: str) -> None:
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"][next(iter(content["weight_map"]))] = elsewhere
    index.write_text(json.dumps(content))

    assert f"names {elsewhere}, which is not a file beside it" in refusal(sharded)

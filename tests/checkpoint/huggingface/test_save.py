"""``save_pretrained``: failed writes, replaced checkpoints and the written files."""

import json
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from nxdpp import NxDPPModel, load_pretrained, parallel_state, save_pretrained
from nxdpp.checkpoint.huggingface import write_directory
from nxdpp.checkpoint.huggingface.write_directory import SavedDirectory, Shard
from nxdpp.tensor.layers import ParallelEmbedding
from nxdpp.tensor.padding import ranges
from tests.checkpoint.huggingface.checkpointed_models import differing, make, on_meta, tensors_in, wrap
from tests.support.run_ranks import run_ranks

pytestmark = pytest.mark.usefixtures("no_groups_left")


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def error_of(act: Callable[[], object]) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def of_two_ranks(rank: int, folder: Path) -> dict[str, str]:
    """Save over an earlier checkpoint of more files; return the errors of saves that cannot be made."""
    path = folder / "saved"
    wrapped = wrap(make("llama", seed=1), 2)
    for size, least in ((20_000, 6), (10**9, 2)):
        write_directory.SHARD_BYTES = size
        save_pretrained(wrapped, path)
        assert len(list(path.glob("model-*-of-*.safetensors"))) >= least
    before, errors = contents(path), {}
    other = wrap(make("llama", seed=5), 2)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for failing in range(2):
        # The failing rank must not write files of the size that it needs.
        if rank == failing:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
        errors[f"full disk of {failing}"] = error_of(lambda: save_pretrained(other, path))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        parallel_state.get_exchange().gather(None)
        assert contents(path) == before
    # Only rank 0 has values.
    empty = wrap(on_meta("llama"), 2)
    if rank == 0:
        empty.materialise()
    errors["no values"] = error_of(lambda: save_pretrained(empty, folder / "none"))
    module = Overlapping(1)
    module.layers[1].register_buffer("turns", torch.zeros(2, dtype=torch.complex128))
    numbers = wrap(module, 2, transformer_layer_cls=nn.Linear)
    errors["dtype"] = error_of(lambda: save_pretrained(numbers, folder / "none"))
    write_directory.SHARD_BYTES = 20_000
    save_pretrained(wrap(make("mixtral"), 2), folder / "mixtral")
    parallel_state.destroy_model_parallel()
    errors["padding"] = save_padded_rows(rank, folder / "parts")
    return errors


def test_saves_of_two_ranks_and_those_that_fail(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    # Of another program, and of a killed save.
    (path / ".unfinished" / "tmp1").mkdir(parents=True)
    (path / "notes.txt").write_text("kept")
    for name in ("model-00003-of-00009.safetensors", ".tmpABCDEF", "tmp1/config.json"):
        (path / ".unfinished" / name).write_text("{}")
    errors = run_ranks(2, of_two_ranks, tmp_path)

    for failing in range(2):
        messages = [each[f"full disk of {failing}"] for each in errors]
        file = path / ".unfinished" / f"model-0000{failing + 1}-of-00002.safetensors"
        assert messages[failing].startswith(f"OSError: {file} cannot be written: ")
        assert messages[1 - failing].startswith(f"RuntimeError: {path} was not written: on rank {failing}, ")
        assert all(f"{file} cannot be written: " in message and "File too large" in message for message in messages)
    first, second = errors
    assert "tensors of this rank are on the meta device, without values to save (model." in second["no values"]
    assert f"{tmp_path / 'none'} was not written: on rank 1, ValueError: " in first["no values"]
    assert all(
        "layers.1.turns is of torch.complex128, which a checkpoint cannot hold" in each["dtype"] for each in errors
    )
    assert not (tmp_path / "none").exists()

    padding = "0 has 5 tokens in 6 rows, of which files would have the 1 of padding too"
    assert all(padding in each["padding"] for each in errors)

    configuration = ["config.json", "generation_config.json"]
    index = "model.safetensors.index.json"
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert names(path) in (
        [*configuration, *shards, index, "notes.txt"],
        [".unfinished", *configuration, *shards, index, "notes.txt"],
    )
    assert differing(tensors_in(path), make("llama", seed=1).state_dict()) == []
    # One rank replaces the files of two.
    save_pretrained(wrap(make("llama", seed=2)), path)
    assert names(path) == [*configuration, "model.safetensors", "notes.txt"]
    check_files_of_a_rank(tmp_path / "mixtral")


def check_files_of_a_rank(folder: Path) -> None:
    """Several files have at most 20 kB, or the converted experts of a layer, and the index has their tensors."""
    shards = [file for file in names(folder) if file.startswith("model-")]
    assert shards == [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    sizes = [sum(tensor.nbytes for tensor in load_file(folder / shard).values()) for shard in shards]
    assert len(shards) >= 6
    assert 0 < min(sizes[:-1]) <= max(sizes) <= 50_000
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(sizes)}
    assert {tensor: file for file in shards for tensor in load_file(folder / file)} == index["weight_map"]
    expected = type(make("mixtral")).from_pretrained(folder).state_dict()
    assert differing(make("mixtral").state_dict(), expected) == []


PADDED = torch.arange(36.0).view(9, 4)


def layers_with_parts(rank: int) -> Any:
    """Layers with a parameter of three blocks, padded from 3 to 4 rows, and one that both tensor ranks hold."""
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    padded = torch.zeros(6, 4)
    for start, own, length in ranges(9, 6, 3, rank):
        padded[own : own + length] = PADDED[start : start + length]
    shared = {"tensor_model_parallel": True, "partition_dim": 0}
    model[0].padded = nn.Parameter(padded)
    vars(model[0].padded).update(shared, partition_stride=3, num_partitions=2, whole_size=9)
    model[1].copied = nn.Parameter(PADDED[:2].clone())
    vars(model[1].copied).update(shared, partition_stride=1, num_partitions=1)
    return model


def check_parts(rank: int, folder: Path) -> None:
    save_pretrained(NxDPPModel(layers_with_parts(rank), transformer_layer_cls=nn.Linear), folder)
    saved = tensors_in(folder)
    assert torch.equal(saved["0.padded"], PADDED.cpu())
    assert torch.equal(saved["1.copied"], PADDED[:2].cpu())
    model, expected = layers_with_parts(rank), layers_with_parts(rank)
    model[0].padded.data.fill_(-1.0)
    model[1].copied.data.fill_(-1.0)
    load_pretrained(NxDPPModel(model, transformer_layer_cls=nn.Linear), folder)
    assert torch.equal(model[0].padded, expected[0].padded)
    assert torch.equal(model[1].copied, expected[1].copied)


def save_padded_rows(rank: int, folder: Path) -> str:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model = nn.Sequential(ParallelEmbedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(NotImplementedError, match=r"\S") as caught:
        save_pretrained(NxDPPModel(model, transformer_layer_cls=nn.Linear), folder)
    check_parts(rank, folder)
    return str(caught.value)


def test_changes_after_wrapping_are_saved_with_the_usual_permissions(tmp_path: Path) -> None:
    wrapped = wrap(make("llama"))
    wrapped.to(torch.bfloat16)
    for mask, mode in ((0o027, 0o640), (0o022, 0o644)):
        before = os.umask(mask)
        save_pretrained(wrapped, tmp_path)
        os.umask(before)
        assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {mode}

    expected = make("llama").to(torch.bfloat16).state_dict()
    assert differing(tensors_in(tmp_path), expected) == []
    assert '"dtype": "bfloat16"' in (tmp_path / "config.json").read_text()
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        # transformers refuses a file without it.
        assert file.metadata() == {"format": "pt"}


class Overlapping(nn.Module):
    """Module with tensors that safetensors does not accept directly."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        memory = torch.rand(24, generator=generator)
        self.layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))
        for layer in self.layers:
            layer.weight = nn.Parameter(torch.rand(2, 2, generator=generator).t())
        buffers = {
            "whole": memory,
            "part": memory[4:8],
            "same": memory.view(4, 6),
            "across": memory.view(4, 6).t(),
            "empty": memory[:0],
            "scalar": memory[3],
            "conjugate": torch.complex(memory[:3], memory[3:6]).conj(),
            "negative": torch.complex(memory[:3], memory[3:6]).conj().imag,
        }
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def test_tensors_that_share_memory_or_are_not_contiguous(tmp_path: Path) -> None:
    wrapped = wrap(Overlapping(1), transformer_layer_cls=nn.Linear)
    save_pretrained(wrapped, tmp_path)

    expected = Overlapping(1).state_dict()
    assert expected["negative"].is_neg()
    assert tensors_in(tmp_path).keys() == expected.keys()
    assert differing(tensors_in(tmp_path), expected) == []


def test_a_rank_that_cannot_write_gathers_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``tensors_of`` is collective: the other ranks of the tensor group would wait for it."""
    shards = [Shard(0), Shard(0), Shard(0)]
    gathered: list[Shard] = []

    def tensors_of(shard: Shard) -> dict[str, torch.Tensor]:
        gathered.append(shard)
        return {}

    def write_shard(path: Path, tensors: object) -> None:
        raise OSError(f"no space for {path.name}")

    monkeypatch.setattr(write_directory, "write_shard", write_shard)
    with pytest.raises(OSError, match="no space for model-00001-of-00003"):
        SavedDirectory(tmp_path, shards).write(0, tensors_of, 0)
    assert gathered == shards

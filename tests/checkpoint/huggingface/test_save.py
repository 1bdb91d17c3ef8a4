"""``save_pretrained``: failed writes, replaced checkpoints, refused models and the written files."""

import json
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from nxdpp import NxDPPModel, load_pretrained, parallel_state, save_pretrained
from nxdpp.checkpoint.files.pieces import StoredLayout
from nxdpp.checkpoint.huggingface import write_directory
from nxdpp.checkpoint.huggingface.write_directory import plan_shards
from nxdpp.tensor.layers import ParallelEmbedding
from nxdpp.tensor.padding import ranges
from tests.checkpoint.huggingface.checkpointed_models import differing, make, on_meta, tensors_in, wrap
from tests.support.run_ranks import run_ranks
from tools.zoo import build


@pytest.fixture(autouse=True)
def no_groups_left() -> Iterator[None]:
    yield
    parallel_state.destroy_model_parallel()


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def save(rank: int, ranks: int, folder: Path, seed: int) -> None:
    save_pretrained(wrap(make("llama", seed=seed), ranks), folder)


def test_an_earlier_checkpoint_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("kept")
    # Files of a killed save.
    (tmp_path / ".unfinished" / "tmp1").mkdir(parents=True)
    for name in ("model-00003-of-00009.safetensors", ".tmpABCDEF", "tmp1/config.json"):
        (tmp_path / ".unfinished" / name).write_text("{}")
    configuration = ["config.json", "generation_config.json"]
    for seed, ranks in enumerate((4, 2, 1, 1, 2)):
        run_ranks(ranks, save, ranks, tmp_path, seed)

        shards = [f"model-{number:05d}-of-{ranks:05d}.safetensors" for number in range(1, ranks + 1)]
        weights = ["model.safetensors"] if ranks == 1 else [*shards, "model.safetensors.index.json"]
        assert names(tmp_path) == [*configuration, *weights, "notes.txt"]
        assert differing(tensors_in(tmp_path), make("llama", seed=seed).state_dict()) == []


def error_of_saving(rank: int, ranks: int, folder: Path, failing_rank: int | None) -> str:
    """The error of this rank; ``failing_rank`` must not write files of the size that it needs."""
    wrapped = wrap(make("llama", seed=5), ranks)
    if rank == failing_rank:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    try:
        save_pretrained(wrapped, folder)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_full_disk_leaves_the_earlier_checkpoint(failing_rank: int, tmp_path: Path) -> None:
    run_ranks(2, save, 2, tmp_path, 1)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}

    messages = run_ranks(2, error_of_saving, 2, tmp_path, failing_rank)

    file = tmp_path / ".unfinished" / f"model-0000{failing_rank + 1}-of-00002.safetensors"
    assert messages[failing_rank].startswith(f"OSError: {file} cannot be written: ")
    assert messages[1 - failing_rank].startswith(f"RuntimeError: {tmp_path} was not written: on rank {failing_rank}, ")
    assert all(f"{file} cannot be written: " in message and "File too large" in message for message in messages)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_file_at_the_path_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    first, second = run_ranks(2, error_of_saving, 2, tmp_path / "file", None)
    assert first.startswith("FileExistsError")
    assert str(tmp_path / "file") in first
    assert second.startswith(f"RuntimeError: {tmp_path / 'file'} was not written: on rank 0, FileExistsError")


def test_a_directory_that_cannot_be_made() -> None:
    for message in run_ranks(2, error_of_saving, 2, Path("/proc/1/nothing/here"), None):
        assert "/proc/1/nothing" in message


def save_without_values(rank: int, folder: Path) -> str:
    # Only rank 0 has values.
    wrapped = wrap(on_meta("llama"), 2)
    if rank == 0:
        wrapped.materialise()
    with pytest.raises(ValueError, match=r"on the meta device") as caught:
        save_pretrained(wrapped, folder)
    return str(caught.value)


def test_a_model_without_values_is_refused_on_every_rank(tmp_path: Path) -> None:
    first, second = run_ranks(2, save_without_values, tmp_path / "none")

    assert "tensors of this rank are on the meta device, without values to save (model." in second
    assert "load_pretrained(model, DIRECTORY) or model.materialise()" in second
    assert first.startswith(f"{tmp_path / 'none'} was not written: on rank 1, ValueError: ")
    assert not (tmp_path / "none").exists()


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


def test_rows_behind_a_vocabulary_are_refused_and_other_parts_are_whole_in_files(tmp_path: Path) -> None:
    for message in run_ranks(2, save_padded_rows, tmp_path):
        assert "0 has 5 tokens in 6 rows, of which files would have the 1 of padding too" in message


@pytest.mark.parametrize(
    ("sign", "kind"), [("hf_quantizer", "quantized models"), ("peft_config", r"models with add_adapter\(\)")]
)
def test_quantized_models_and_adapters_are_refused(sign: str, kind: str, tmp_path: Path) -> None:
    model = make("llama")
    setattr(model, sign, True)
    wrapped = wrap(model)
    with pytest.raises(NotImplementedError, match=f"saving {kind} is not implemented"):
        save_pretrained(wrapped, tmp_path)


def test_sources_of_a_conversion_on_two_ranks_are_refused() -> None:
    model = build("masked-lm", "nomic_bert", "meta")
    layouts = {name: StoredLayout(tuple(tensor.shape), tensor.dtype) for name, tensor in model.state_dict().items()}
    (whole,) = plan_shards(model, [], [layouts])
    merged = [conversion for conversion in whole.conversions if len(conversion.names) > 1]
    assert merged
    first, *others = merged[0].names
    held = [{first: layouts.pop(first)}, layouts]

    with pytest.raises(NotImplementedError, match=r"which are on several ranks here") as caught:
        plan_shards(model, [], held)
    assert all(name in str(caught.value) for name in (first, *others))


@pytest.mark.parametrize("unwrapped", [make("llama"), NxDPPModel], ids=["module", "class"])
def test_an_unwrapped_model_is_refused(unwrapped: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="save_pretrained is for an NxDPPModel"):
        save_pretrained(unwrapped, tmp_path)


def test_a_directory_without_a_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wrapped = wrap(make("llama"))
    with pytest.raises(ValueError, match="path='' has no name"):
        save_pretrained(wrapped, "")
    for function in (save_pretrained, load_pretrained):
        with pytest.raises(ValueError, match="path='s3://bucket/run' is not on a file system"):
            function(wrapped, "s3://bucket/run")
    assert not list(tmp_path.iterdir())


def test_changes_after_wrapping_are_saved(tmp_path: Path) -> None:
    wrapped = wrap(make("llama"))
    wrapped.to(torch.bfloat16)
    save_pretrained(wrapped, tmp_path)

    expected = make("llama").to(torch.bfloat16).state_dict()
    assert differing(tensors_in(tmp_path), expected) == []
    assert '"dtype": "bfloat16"' in (tmp_path / "config.json").read_text()


def save_in_small_files(rank: int, folder: Path) -> None:
    write_directory.SHARD_BYTES = 20_000
    for name in ("llama", "mixtral"):
        save_pretrained(wrap(make(name), 2), folder / name)


def test_a_rank_writes_several_files(tmp_path: Path) -> None:
    run_ranks(2, save_in_small_files, tmp_path)

    for name in ("llama", "mixtral"):
        files = names(tmp_path / name)
        shards = [file for file in files if file.startswith("model-")]
        assert len(shards) >= 6
        assert shards == [
            f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)
        ]
        sizes = [sum(tensor.nbytes for tensor in load_file(tmp_path / name / shard).values()) for shard in shards]
        # The embedding and the converted experts of a layer of the Mixtral are larger.
        assert max(sizes) <= (20_000 if name == "llama" else 50_000), sizes
        assert min(sizes[:-1]) > 0
        expected = type(make(name)).from_pretrained(tmp_path / name).state_dict()
        assert differing(make(name).state_dict(), expected) == []
        index = json.loads((tmp_path / name / "model.safetensors.index.json").read_text())
        assert index["metadata"] == {"total_size": sum(sizes)}
        assert {tensor: file for file in shards for tensor in load_file(tmp_path / name / file)} == index["weight_map"]


def test_files_have_the_usual_permissions(tmp_path: Path) -> None:
    wrapped = wrap(make("llama"))
    for mask, mode in ((0o027, 0o640), (0o022, 0o644)):
        before = os.umask(mask)
        save_pretrained(wrapped, tmp_path)
        os.umask(before)
        assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {mode}


def test_files_name_their_format(tmp_path: Path) -> None:
    save_pretrained(wrap(make("llama")), tmp_path)

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


def save_with_complex_numbers(rank: int, folder: Path) -> str:
    model = Overlapping(1)
    model.layers[1].register_buffer("turns", torch.zeros(2, dtype=torch.complex128))
    wrapped = wrap(model, 2, transformer_layer_cls=nn.Linear)
    with pytest.raises(ValueError, match=r"\S") as caught:
        save_pretrained(wrapped, folder)
    return str(caught.value)


def test_unsupported_dtypes_are_refused(tmp_path: Path) -> None:
    for message in run_ranks(2, save_with_complex_numbers, tmp_path / "none"):
        assert "layers.1.turns is of torch.complex128, which a checkpoint cannot hold: convert it" in message
    assert not (tmp_path / "none").exists()

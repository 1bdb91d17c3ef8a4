"""Checkpoints with other names than the model: ``load_pretrained`` converts them as transformers does."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from nxdpp import load_pretrained, parallel_state, save_pretrained
from tests.checkpoint.huggingface.checkpointed_models import differing, make, saved_by_transformers, tensors_in, wrap
from tests.support.plain_models import BatchNorms
from tests.support.run_ranks import run_ranks


@pytest.fixture(autouse=True)
def no_groups_left() -> Iterator[None]:
    yield
    parallel_state.destroy_model_parallel()


def rename(folder: Path, change: Callable[[str], str]) -> None:
    file = folder / "model.safetensors"
    save_file({change(name): tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})


def as_transformers(name: str, folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors that transformers loads from ``folder``, after a comparison with ``load_pretrained``."""
    expected: dict[str, torch.Tensor] = type(make(name)).from_pretrained(folder).state_dict()
    wrapped = wrap(make(name, seed=5))
    load_pretrained(wrapped, folder)
    assert differing(wrapped.local_state_dict(), expected) == []
    return expected


def test_old_names_of_bert_norms(tmp_path: Path) -> None:
    saved_by_transformers("bert", tmp_path)
    endings = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}

    def first_names(name: str) -> str:
        for new, old in endings.items():
            name = name.replace(new, old)
        return name

    rename(tmp_path, first_names)
    assert "cls.predictions.transform.LayerNorm.gamma" in tensors_in(tmp_path)

    loaded = as_transformers("bert", tmp_path)
    assert differing(loaded, make("bert").state_dict()) == []


def test_old_names_are_saved_as_by_transformers(tmp_path: Path) -> None:
    saved_by_transformers("bert", tmp_path / "old")
    rename(tmp_path / "old", lambda name: name.replace("LayerNorm.weight", "LayerNorm.gamma"))
    theirs: Any = type(make("bert")).from_pretrained(tmp_path / "old")
    theirs.save_pretrained(tmp_path / "theirs")
    wrapped = wrap(make("bert", seed=5))
    load_pretrained(wrapped, tmp_path / "old")
    save_pretrained(wrapped, tmp_path / "ours")

    saved, expected = tensors_in(tmp_path / "ours"), tensors_in(tmp_path / "theirs")
    assert saved.keys() == expected.keys()
    assert differing(saved, expected) == []


@pytest.mark.parametrize("name", ["gpt2", "tied_llama"])
def test_weights_of_the_base_model_alone(name: str, tmp_path: Path) -> None:
    """Names without prefix and without the tied head, as in the published GPT-2."""
    make(name).base_model.save_pretrained(tmp_path)
    assert not any(key.startswith(make(name).base_model_prefix) for key in tensors_in(tmp_path))

    assert differing(as_transformers(name, tmp_path), make(name).state_dict()) == []


def test_a_tied_weight_under_its_other_name(tmp_path: Path) -> None:
    saved_by_transformers("tied_llama", tmp_path)
    rename(tmp_path, lambda name: name.replace("model.embed_tokens.weight", "lm_head.weight"))

    assert differing(as_transformers("tied_llama", tmp_path), make("tied_llama").state_dict()) == []


def test_a_tied_weight_under_both_names(tmp_path: Path) -> None:
    saved_by_transformers("tied_llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})

    assert differing(as_transformers("tied_llama", tmp_path), make("tied_llama").state_dict()) == []


def test_obsolete_buffers_are_ignored(tmp_path: Path) -> None:
    saved_by_transformers("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})

    assert differing(as_transformers("llama", tmp_path), make("llama").state_dict()) == []


def batch_norms(seed: int) -> nn.Module:
    """A module that is not from transformers, with changing buffers, unsaved buffers and tied weights."""
    model = BatchNorms()
    generator = torch.Generator().manual_seed(seed)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape, generator=generator))
        else:
            tensor.fill_(seed)
    model.blocks[2].get_submodule("norm").weight = model.blocks[0].get_submodule("norm").weight
    return model


def save_plain(rank: int, ranks: int, folder: Path) -> None:
    save_pretrained(wrap(batch_norms(1), ranks, transformer_layer_cls="NormBlock"), folder)


def load_plain(rank: int, ranks: int, folder: Path) -> list[str]:
    wrapped = wrap(batch_norms(2), ranks, transformer_layer_cls="NormBlock")
    load_pretrained(wrapped, folder)
    return differing(wrapped.local_state_dict(), batch_norms(1).state_dict())


@pytest.mark.parametrize(("saving", "loading"), [(1, 3), (3, 1), (3, 2)])
def test_a_module_that_is_not_from_transformers(saving: int, loading: int, tmp_path: Path) -> None:
    run_ranks(saving, save_plain, saving, tmp_path)

    names = set(batch_norms(1).state_dict())
    assert tensors_in(tmp_path).keys() == names - {"blocks.2.norm.weight"}
    assert not list(tmp_path.glob("*config.json"))
    assert run_ranks(loading, load_plain, loading, tmp_path) == [[]] * loading

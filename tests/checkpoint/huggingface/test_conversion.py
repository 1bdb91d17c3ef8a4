"""Checkpoints with other names than the model: ``load_pretrained`` converts them as transformers does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from nxdpp import load_pretrained, save_pretrained
from tests.checkpoint.huggingface.checkpointed_models import differing, make, saved_by_transformers, tensors_in, wrap
from tests.support.plain_models import BatchNorms
from tests.support.run_ranks import run_ranks

pytestmark = pytest.mark.usefixtures("no_groups_left")


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


def test_old_names_are_loaded_and_saved_as_by_transformers(tmp_path: Path) -> None:
    """Of the norms of BERT."""
    saved_by_transformers("bert", tmp_path)
    rename(
        tmp_path,
        lambda name: name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"),
    )
    assert "cls.predictions.transform.LayerNorm.gamma" in tensors_in(tmp_path)
    theirs: Any = type(make("bert")).from_pretrained(tmp_path)
    assert differing(theirs.state_dict(), make("bert").state_dict()) == []
    theirs.save_pretrained(tmp_path / "theirs")
    wrapped = wrap(make("bert", seed=5))
    load_pretrained(wrapped, tmp_path)
    assert differing(wrapped.local_state_dict(), theirs.state_dict()) == []
    save_pretrained(wrapped, tmp_path / "ours")

    saved, expected = tensors_in(tmp_path / "ours"), tensors_in(tmp_path / "theirs")
    assert saved.keys() == expected.keys()
    assert differing(saved, expected) == []


def test_weights_of_the_base_model_alone(tmp_path: Path) -> None:
    """Names without prefix and without the tied head, as in the published GPT-2."""
    make("gpt2").base_model.save_pretrained(tmp_path)
    assert not any(key.startswith(make("gpt2").base_model_prefix) for key in tensors_in(tmp_path))

    assert differing(as_transformers("gpt2", tmp_path), make("gpt2").state_dict()) == []


def test_other_names_of_a_tied_weight_and_obsolete_buffers(tmp_path: Path) -> None:
    saved_by_transformers("tied_llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    one = tensors.pop("model.embed_tokens.weight")
    obsolete = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    for tied in (
        {"lm_head.weight": one},
        {"lm_head.weight": one, "model.embed_tokens.weight": one.clone(), **obsolete},
    ):
        save_file({**tensors, **tied}, tmp_path / "model.safetensors", {"format": "pt"})
        assert differing(as_transformers("tied_llama", tmp_path), make("tied_llama").state_dict()) == []


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


def test_a_module_that_is_not_from_transformers(tmp_path: Path) -> None:
    run_ranks(3, save_plain, 3, tmp_path)

    names = set(batch_norms(1).state_dict())
    assert tensors_in(tmp_path).keys() == names - {"blocks.2.norm.weight"}
    assert not list(tmp_path.glob("*config.json"))
    assert run_ranks(2, load_plain, 2, tmp_path) == [[]] * 2

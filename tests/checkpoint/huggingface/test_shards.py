"""Hugging Face directories and state dicts of models whose parameters are shards of rows."""

from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import nxdpp
from nxdpp import NxDPPModel, parallel_state, tensor_parallelize
from nxdpp.gradients.shards.local_tensors import local_rows
from nxdpp.tensor.shards import all_rows
from tests.support.run_ranks import run_ranks
from tests.support.tensor_models import make


def _wrapped(name: str, tensor: int, seed: int | None = None, meta: bool = False) -> NxDPPModel[bool, bool]:
    """A wrapped model of shards over 2 ranks, with values of ``seed`` in the place of its own."""
    module = make(name, tie_word_embeddings=True)
    if meta:
        module.to("meta")
        module.tie_weights()
    elif seed is not None:
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_()
    if tensor > 1:
        tensor_parallelize(module)
    model: NxDPPModel[bool, bool] = NxDPPModel(module, num_microbatches=2)
    nxdpp.fully_shard(model)
    return model


def _equal(model: NxDPPModel[bool, bool], expected: nn.Module) -> bool:
    """Return whether all rows of the shards are those of ``expected``; collective over the replicas."""
    own = dict(expected.named_parameters())
    return all(
        isinstance(each, DTensor) and torch.equal(all_rows(each), own[name])
        for name, each in model.local_named_parameters()
    )


def _case(rank: int, path: Path, name: str, tensor: int) -> None:
    expected = make(name, tie_word_embeddings=True)
    model = _wrapped(name, tensor)
    nxdpp.save_pretrained(model, path / name)
    if rank == 0:
        read = type(expected).from_pretrained(path / name).state_dict()
        assert all(torch.equal(read[key].cpu(), value.cpu()) for key, value in expected.state_dict().items()), name
    gathered = nxdpp.gather_state_dict(model)
    if gathered is not None:
        assert all(torch.equal(gathered[key], value.cpu()) for key, value in expected.state_dict().items()), name
    for other in (_wrapped(name, tensor, seed=5), _wrapped(name, tensor, meta=True)):
        nxdpp.load_pretrained(other, path / name)
        for (key, ours), theirs in zip(other.local_named_parameters(), model.local_parameters(), strict=True):
            assert isinstance(ours, DTensor)
            assert isinstance(ours, nn.Parameter)
            assert torch.equal(local_rows(ours), local_rows(theirs)), (name, key)


def _cases(rank: int, path: Path) -> None:
    """Stages of shards, and shards of tensor-parallel parts."""
    parallel_state.initialize_model_parallel(1, 2)
    _case(rank, path, "llama", 1)
    _state_dicts(make("llama", tie_word_embeddings=True), "llama")
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(2, 1)
    _case(rank, path, "mixtral", 2)


def _state_dicts(expected: nn.Module, name: str) -> None:
    model = _wrapped(name, 1, seed=5)
    assert not _equal(model, expected)
    model.load_state_dict(expected.state_dict())
    assert _equal(model, expected)
    state = model.state_dict()
    assert all(isinstance(state[key], DTensor) for key, _ in model.named_parameters())
    other = _wrapped(name, 1, seed=6)
    other.load_state_dict(state)
    assert _equal(other, expected)
    other = _wrapped(name, 1, seed=6)
    other.load_state_dict(expected.state_dict(), assign=True)
    assert _equal(other, expected)


def test_shards_are_saved_gathered_and_loaded(tmp_path: Path) -> None:
    run_ranks(4, _cases, tmp_path)

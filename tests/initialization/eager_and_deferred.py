"""Bit-for-bit comparison of a module from its constructor with one from ``deferred_init``."""

import random
from collections.abc import Callable

import torch
from torch import nn

from nxdpp import deferred_init
from nxdpp.initialization.record import record_of


def check(make: Callable[[], nn.Module], seed: int = 0) -> None:
    """Compare all parameters and buffers, materialised in random order, and the state of the generator."""
    torch.manual_seed(seed)
    eager = make()
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    deferred = deferred_init(make)
    assert torch.equal(torch.get_rng_state(), state), "the generator state differs from that of the eager constructor"
    expected, found = _named(eager), _named(deferred)
    assert list(expected) == list(found)
    assert _ties(expected) == _ties(found)
    record = record_of(deferred)
    assert record is not None
    names = list(expected)
    random.Random(seed).shuffle(names)
    for name in names:
        want, have = expected[name], found[name]
        assert have.is_meta, name
        assert (type(have), have.requires_grad, vars(have)) == (type(want), want.requires_grad, vars(want)), name
        value = record.materialise(have)
        assert (value.dtype, value.shape, value.stride()) == (want.dtype, want.shape, want.stride()), name
        assert torch.equal(_bits(value), _bits(want)), name
    assert torch.equal(torch.get_rng_state(), state), "materialising changed the generator"


def _named(module: nn.Module) -> dict[str, torch.Tensor]:
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(module.named_buffers(remove_duplicate=False))}


def _ties(named: dict[str, torch.Tensor]) -> list[list[str]]:
    groups: dict[int, list[str]] = {}
    for name, tensor in named.items():
        groups.setdefault(id(tensor), []).append(name)
    return sorted(groups.values())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat

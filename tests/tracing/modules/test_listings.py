"""Listings of modules and parameters, against those of torch and for classes that override them."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from nxdpp.tracing.modules import listings
from tests.support.models import make
from tests.support.plain_models import Block


@pytest.mark.parametrize("remove_duplicate", [True, False])
def test_listings_are_those_of_torch(remove_duplicate: bool) -> None:
    model = make("tied_llama")
    model.extra = nn.Sequential(nn.BatchNorm1d(2), model.model.layers[0])
    model.register_module("nothing", None)
    for ours, torchs in (
        (listings.named_modules, model.named_modules),
        (listings.named_parameters, model.named_parameters),
        (listings.named_buffers, model.named_buffers),
    ):
        names = [(name, id(value)) for name, value in torchs(remove_duplicate=remove_duplicate)]
        assert [(name, id(value)) for name, value in ours(model, remove_duplicate)] == names


def test_a_wrapped_module_is_found() -> None:
    block = Block()
    wrapped = checkpoint_wrapper(torch.compile(block, backend="eager"))  # type: ignore[arg-type]
    assert listings.unwrapped(wrapped) is block
    assert listings.unwrapped(block) is block


def test_a_module_is_found_in_the_registries_by_its_name() -> None:
    class Hiding(nn.Sequential):
        def __getattr__(self, name: str) -> Any:
            raise AttributeError(name)

    model = make("tied_llama")
    for name, module in model.named_modules():
        assert listings.submodule(model, name) is module
    block = Block()
    assert listings.submodule(nn.ModuleList([Hiding(block)]), "0.0") is block
    with pytest.raises(AttributeError, match="nothing"):
        listings.submodule(model, "model.nothing")

"""Replacements after the cut: the rank's tree and the whole model follow each other."""

import pytest
import torch
from torch import nn

from nxdpp.pipeline.local.replaced_modules import ReplacementSync
from nxdpp.pipeline.local.tree import build_local_module, local_names
from tests.support.in_process import InProcessPipeline
from tests.support.traced_models import PlainLayer, PlainModel, options_for


class WithState(PlainModel):
    """Parameters and buffers of the model itself."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def prepare(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.scale + self.table


def build(model: nn.Module) -> nn.Module:
    """Build the tree of stage 0 of 2."""
    chain = InProcessPipeline(model, 2, {"x": torch.ones(3, 4)}, options_for(model, PlainLayer))
    local = local_names(chain.partition.owners, 0)
    assert "scale" in local
    return build_local_module(model, local, list(chain.partition.layer_stages))


def test_whole_model_follows_a_moved_tree() -> None:
    model = WithState()
    tree = build(model)
    assert "table" not in tree.state_dict()

    sync = ReplacementSync(tree, model)

    tree._apply(lambda tensor: tensor.double())
    assert sync.follow() == ({}, True)

    assert model.scale is tree.scale
    assert model.table is tree.table
    assert model.table.dtype is torch.float64
    assert model.layers[0].get_parameter("linear.weight").dtype is torch.float64
    assert model.layers[3].get_parameter("linear.weight").dtype is torch.float32


def test_a_replaced_layer_is_found_in_either_tree() -> None:
    model = WithState()
    tree = build(model)
    sync = ReplacementSync(tree, model)
    first, second = model.layers[0], model.layers[1]

    tree.get_submodule("layers").register_module("0", nn.Identity())
    model.layers[1] = nn.Identity()

    assert sync.follow() == ({"layers.0": first, "layers.1": second}, True)
    assert model.layers[0] is tree.get_submodule("layers.0") is not first
    assert model.layers[1] is tree.get_submodule("layers.1") is not second
    assert sync.follow() == ({}, False)


def test_a_replaced_layer_of_another_rank_is_freed() -> None:
    model = WithState()
    sync = ReplacementSync(build(model), model)
    last, new = model.layers[3], PlainLayer()
    new.requires_grad_(False)
    new.linear.weight = model.get_parameter("layers.2.linear.weight")

    model.layers[3] = new

    assert sync.follow() == ({"layers.3": last}, True)
    assert model.layers[3] is new
    assert new.linear.weight is model.get_parameter("layers.2.linear.weight")
    assert new.linear.bias.is_meta
    assert not new.linear.bias.requires_grad
    assert sync.follow() == ({}, False)


def test_a_part_of_a_layer_of_another_rank_is_freed() -> None:
    model = WithState()
    sync = ReplacementSync(build(model), model)
    model.layers[3].linear = nn.Linear(4, 4)

    assert sync.follow() == ({}, False)
    with pytest.raises(RuntimeError, match="another rank holds weight, and a state dict"):
        model.layers[3].linear.state_dict()


def test_a_layer_of_another_rank_that_was_removed_is_put_back() -> None:
    model = WithState()
    sync = ReplacementSync(build(model), model)
    last = model.layers[3]
    del model.layers._modules["3"]

    assert sync.follow() == ({"layers.3": last}, True)
    assert model.layers[3] is last

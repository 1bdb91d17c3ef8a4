"""The tree of a rank: its own modules under their names; other parameters are freed."""

import weakref
from typing import Any

import torch
from torch import nn

from nxdpp.pipeline.local.tree import build_local_module, free_others, local_names, names_elsewhere
from nxdpp.pipeline.partition.assignment import Owners
from tests.support.in_process import InProcessPipeline
from tests.support.traced_models import make_inputs, make_model


def _cut(model: nn.Module, architecture: str, stages: int) -> tuple[Owners, list[str]]:
    chain = InProcessPipeline(model, stages, make_inputs(architecture))
    return chain.partition.owners, list(chain.partition.layer_stages)


def test_a_table_of_positions_stays_where_its_decoder_is_elsewhere() -> None:
    model = nn.Module()
    for name in ("encoder", "decoder"):
        half = nn.Module()
        half.layers = nn.ModuleList([nn.Linear(2, 2)])
        half.table = nn.Module()
        half.table.register_buffer("frequencies", torch.ones(2))
        model.add_module(name, half)
    local = {"encoder.layers.0.weight", "encoder.layers.0.bias"}
    tree = build_local_module(model, local, ["encoder.layers.0", "decoder.layers.0"])
    assert {name for name, _ in tree.named_parameters()} == local
    # Every rank computes what follows from the inputs.
    assert {name for name, _ in tree.named_buffers()} == {"encoder.table.frequencies", "decoder.table.frequencies"}


def test_freed_parameters_are_not_in_memory() -> None:
    model = make_model("llama")
    owners, layers = _cut(model, "llama", 4)
    local = local_names(owners, 1)
    away = {n: weakref.ref(p.untyped_storage()) for n, p in model.named_parameters() if n not in local}
    parameters = {n: weakref.ref(p) for n, p in model.named_parameters() if n not in local}

    free_others(model, local)
    build_local_module(model, local, layers)

    assert len(away) > 20
    assert [name for name, reference in parameters.items() if reference() is not None] == []
    assert [name for name, reference in away.items() if reference() is not None] == []


class _CountingLayer(nn.Module):
    """Changes a buffer, and has a weight that the head uses too."""

    load: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("load", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.load += x.detach().mean(0)
        changed: torch.Tensor = x + self.linear(x)
        return changed


class _WeightsOfLayers(nn.Module):
    """Uses the weight of its first layer after the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_CountingLayer() for _ in range(2))
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers: Any = self.layers
        hidden = layers[1](layers[0](x))
        loss: torch.Tensor = self.head(hidden @ layers[0].linear.weight).mean()
        return loss


def test_a_buffer_is_on_the_rank_that_changes_it_alone() -> None:
    model = _WeightsOfLayers()
    inputs = {"x": torch.ones(2, 4)}
    owners = InProcessPipeline(model, 2, inputs, transformer_layer_cls=_CountingLayer).partition.owners
    trees = [
        build_local_module(model, local_names(owners, rank), ["layers.0", "layers.1"], names_elsewhere(owners, rank))
        for rank in range(2)
    ]

    assert [[name for name, _ in tree.named_buffers()] for tree in trees] == [["layers.0.load"], ["layers.1.load"]]
    assert "layers.0.linear.weight" in dict(trees[1].named_parameters())
    free_others(model, local_names(owners, 1), names_elsewhere(owners, 1))
    assert {name: buffer.is_meta for name, buffer in model.named_buffers()} == {
        "layers.0.load": True,
        "layers.1.load": False,
    }

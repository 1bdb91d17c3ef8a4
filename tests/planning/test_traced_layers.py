"""``nxdpp.trace_layers``: the layers of a model without ranks."""

import torch
from torch import nn

import nxdpp
from nxdpp.initialization.init_on_device import init_on_device
from nxdpp.pipeline.partition.layer_costs import layer_costs
from nxdpp.tracing.costs.count import count_costs
from tests.support import models, traced_models


class Scored(nn.Module):
    """Takes a dict, and has its layers in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, data: dict[str, torch.Tensor]) -> torch.Tensor:
        x = data["data"]
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(x, data["target"])


def test_layers_and_costs_are_those_of_the_runtime() -> None:
    model, batch = traced_models.make_model("llama"), models.padded_batch(2)
    found = nxdpp.trace_layers(model, batch)

    traced = traced_models.trace_with(model, batch)
    assert found.names == traced.layers
    assert list(found.costs) == layer_costs(traced, model, count_costs(traced, model, batch))
    assert [cost.layer for cost in found.costs] == [*found.names, "head"]
    assert not nxdpp.parallel_state.model_parallel_is_initialized()


def test_a_dict_and_a_model_without_memory() -> None:
    batch = {"data": {"data": torch.zeros(4, 8), "target": torch.zeros(4, 8)}}
    with init_on_device(torch.device("meta")):
        model = Scored()
    found = nxdpp.trace_layers(model, batch, transformer_layer_cls=nn.Linear)

    assert found.names == tuple(f"layers.{index}" for index in range(5))
    assert [cost.work > 0 for cost in found.costs] == [True] * 5
    assert [cost.state_bytes for cost in found.costs] == [4 * 4 * (64 + 8)] * 5
    assert found.even_cuts(2) == ["layers.1"]

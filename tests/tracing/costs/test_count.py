"""Costs of nodes, counted on fake tensors: equal to those of the whole model."""

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils.flop_counter import FlopCounterMode

from nxdpp.tracing.costs.count import NodeCost, count_costs
from nxdpp.tracing.graph.trace import TracedGraph
from tests.support.models import make, padded_batch, reference
from tests.support.traced_models import options_for, trace_with


def _trace(model: nn.Module, inputs: dict[str, torch.Tensor], layer_class: Any = None) -> TracedGraph:
    return trace_with(model, inputs, options_for(model, layer_class))


def _costs(model: Any, inputs: dict[str, torch.Tensor]) -> dict[fx.Node, NodeCost]:
    return count_costs(_trace(model, inputs), model, inputs)


def _batch(device: str | None = None) -> dict[str, torch.Tensor]:
    batch = padded_batch(2, 16)
    return {name: batch[name].to(device or "cpu") for name in ("input_ids", "labels")}


def _of(costs: dict[fx.Node, NodeCost], target: str) -> NodeCost:
    (found,) = [cost for node, cost in costs.items() if node.op == "call_module" and node.target == target]
    return found


def _whole(model: Any, batch: dict[str, torch.Tensor]) -> tuple[int, int]:
    """Return FLOPs of forward and backward, and bytes that autograd saves. Memory counts once."""
    whole = reference(model)
    state = {tensor.untyped_storage().data_ptr() for tensor in (*whole.parameters(), *whole.buffers())}
    saved: dict[int, torch.Tensor] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
        whole(**batch).loss.backward()
    kept = {memory: tensor for memory, tensor in saved.items() if memory not in state}
    return counter.get_total_flops(), sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def test_sum_over_nodes_equals_the_whole_model() -> None:
    model = make("tied_llama")
    model.set_attn_implementation("eager")
    costs = _costs(model, _batch())
    flops, saved_bytes = _whole(model, _batch())

    assert sum(cost.forward + cost.backward for cost in costs.values()) == flops
    names = {value for cost in costs.values() for value in cost.saved_values}
    values = sum(cost.output_bytes for node, cost in costs.items() if node.name in names)
    assert values + sum(cost.saved_bytes for cost in costs.values()) == pytest.approx(saved_bytes, rel=0.02)
    assert not any(cost.estimated for cost in costs.values())


class LinearStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in ((8, 16), (16, 4), (4, 32)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def test_linear_layers_by_hand() -> None:
    model = LinearStack()
    model.layers[2].requires_grad_(False)
    inputs = {"x": torch.empty(5, 8, device="meta")}
    costs = count_costs(_trace(model, inputs, nn.Linear), model, inputs, torch.device("cpu"))
    layers = [_of(costs, f"layers.{index}") for index in range(3)]

    assert [layer.forward for layer in layers] == [2 * 5 * 8 * 16, 2 * 5 * 16 * 4, 2 * 5 * 4 * 32]
    # The first layer needs no gradient of its input. The last layer needs no gradient of its weight.
    assert [layer.backward for layer in layers] == [2 * 5 * 8 * 16, 2 * 2 * 5 * 16 * 4, 2 * 5 * 4 * 32]
    assert [layer.saved_values for layer in layers] == [("x",), ("model_layers_0",), ()]
    assert [layer.output_bytes for layer in layers] == [5 * 16 * 4, 5 * 4 * 4, 5 * 32 * 4]
    # At 10 FLOPs a byte memory bounds these small products: input, weight, bias and output, 4 bytes a value.
    forward = 10 * 4 * (5 * 4 + 4 * 32 + 32 + 5 * 32)
    backward = 10 * 4 * (5 * 32 + 4 * 32 + 5 * 4)
    assert layers[2].work == forward + backward


def test_model_on_the_meta_device_has_equal_costs_and_is_not_changed() -> None:
    with torch.device("meta"):
        on_meta = make("llama")
    before = dict(on_meta.named_parameters())

    assert list(_costs(on_meta, _batch("meta")).values()) == list(_costs(make("llama"), _batch()).values())
    assert all(parameter is before[name] and parameter.is_meta for name, parameter in on_meta.named_parameters())
    assert all(parameter.grad is None for parameter in on_meta.parameters())

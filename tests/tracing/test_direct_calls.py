"""A layer whose ``forward`` is called directly is a layer all the same."""

import torch
from torch import nn

from tests.support.traced_models import PlainLayer, PlainModel, options_for, trace_with


class CallsForward(PlainModel):
    """Calls its layers without their hooks, as SqueezeBERT does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer.forward(x)
        return x


def test_layers_whose_forward_is_called_are_nodes() -> None:
    model = CallsForward()

    traced = trace_with(model, {"x": torch.ones(3, 4)}, options_for(model, PlainLayer))

    assert traced.layers == tuple(f"layers.{index}" for index in range(len(model.layers)))
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_forward_that_the_user_has_put_on_a_layer_stays() -> None:
    model = CallsForward()
    first = next(model.layers.children())
    own = vars(first)["forward"] = first.forward

    trace_with(model, {"x": torch.ones(3, 4)}, options_for(model, PlainLayer))

    assert vars(first)["forward"] is own
    assert isinstance(first, nn.Module)

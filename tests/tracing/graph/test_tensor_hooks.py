"""Hooks of gradients on values between layers: refused in the spine, and exact in a module of their own."""

import pytest
import torch
from torch import Tensor, nn

from nxdpp.tracing.graph.errors import TracingError
from tests.support.exact import assert_exact
from tests.support.traced_models import PlainLayer, PlainModel

INPUTS = {"x": torch.arange(16.0).reshape(4, 4) / 16}


class Hooked(PlainModel):
    """A hook after the second layer, for a trace with gradients."""

    def register(self, hidden: Tensor) -> Tensor:
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * 3)
        return hidden

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden)
            if number == 1:
                hidden = self.register(hidden)
        result: Tensor = self.head(hidden).mean()
        return result


class MaskedGradient(nn.Module):
    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        hidden.register_hook(lambda gradient: gradient * mask)
        return hidden


class WithModule(Hooked):
    def __init__(self) -> None:
        super().__init__()
        self.masked = MaskedGradient()

    def register(self, hidden: Tensor) -> Tensor:
        masked: Tensor = self.masked(hidden, hidden > 0)
        return masked


def test_a_hook_that_forward_registers_is_refused() -> None:
    with pytest.raises(TracingError, match=r"registers a hook on .*a module of its own, which takes the value"):
        assert_exact(Hooked(), INPUTS, PlainLayer)


def test_a_hook_in_a_module_of_its_own_is_exact() -> None:
    assert_exact(WithModule(), INPUTS, PlainLayer)

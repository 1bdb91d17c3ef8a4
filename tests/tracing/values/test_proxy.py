"""Attributes that forward sets on a tensor: the spine reads them, and a layer is not given them."""

from typing import Any

import pytest
import torch

from nxdpp.tracing.graph.errors import TracingError
from tests.support.exact import assert_exact
from tests.support.traced_models import PlainLayer, PlainModel, options_for, trace_with


class Marks(PlainModel):
    """Sets an attribute of the hidden state. ``gives``: the layers get the marked tensor."""

    def __init__(self, gives: bool) -> None:
        super().__init__()
        self.gives = gives

    def forward(self, x: torch.Tensor) -> Any:
        hidden: Any = self.embedding(x)
        hidden.scale = 0.9
        for layer in self.layers:
            hidden = layer(hidden if self.gives else hidden * hidden.scale)
            hidden.scale = 0.8
        return self.head(hidden).mean()


def test_an_attribute_set_on_a_tensor_for_a_layer_is_refused() -> None:
    model = Marks(True)
    with pytest.raises(TracingError, match=r"sets \w+\.scale, and gives .* Give scale to PlainLayer as an argument"):
        trace_with(model, {"x": torch.ones(3, 4)}, options_for(model, PlainLayer))


def test_an_attribute_that_the_spine_alone_reads_is_exact() -> None:
    assert_exact(Marks(False), {"x": torch.ones(4, 4)}, PlainLayer)

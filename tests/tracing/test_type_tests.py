"""Type tests of traced values are answered as in one process, or end in an error when the graph runs."""

from typing import Any

import pytest
import torch
import torch.fx
from torch import Tensor, nn

from nxdpp.tracing.input_specs import InputSpec
from nxdpp.tracing.trace import TracingOptions, trace


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x + 1


class Asking(nn.Module):
    """Asks for the types of its inputs and of what its layers give."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([first, nn.Linear(4, 4)])

    def forward(self, x: Tensor, scale: float | Tensor = 1.0) -> Any:
        hidden = self.blocks[0](x)
        if isinstance(hidden, tuple):
            hidden = hidden[1]
        if isinstance(hidden, Tensor) and torch.is_tensor(x):
            hidden = hidden * 2
        if isinstance(scale, int):
            hidden = hidden + scale
        return self.blocks[1](hidden)


def run(module: nn.Module, x: Tensor, scale: Any) -> Tensor:
    number = isinstance(scale, int | float)
    specs = {"x": InputSpec(2, torch.float32), "scale": InputSpec(None, None, type(scale))}
    if not number:
        specs["scale"] = InputSpec(scale.ndim, scale.dtype)
    graph = trace(module, specs, {}, TracingOptions((nn.Linear, Pair))).graph
    (output,) = torch.fx.GraphModule(module, graph)(x, scale)
    assert isinstance(output, Tensor)
    return output


@pytest.mark.parametrize("scale", [2, 2.0, torch.ones(1)])
def test_a_tensor_and_a_number_are_known_for_what_they_are(scale: Any) -> None:
    module, x = Asking(nn.Linear(4, 4)), torch.randn(3, 4)
    assert torch.equal(run(module, x, scale), module(x, scale))


def test_a_tuple_that_was_taken_for_a_tensor_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"a value between layers is a tuple.*leaf_module_cls"):
        run(Asking(Pair()), torch.randn(3, 4), 1)

"""An error in forward has the innermost line of the model's code, of the spine or of a layer, as in one process."""

from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import NxDPPModel

pytestmark = pytest.mark.usefixtures("one_rank")


class Layer(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_features == 6:
            raise ValueError("of a layer")
        return super().forward(x)


class Model(nn.Module):
    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, width) for width in widths)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().mean()}


def _error(widths: list[int], step: str) -> Exception:
    model: Any = NxDPPModel(Model(widths), transformer_layer_cls=Layer, num_microbatches=2)
    with pytest.raises((RuntimeError, ValueError)) as caught:
        getattr(model, step)(x=torch.ones(4, 4))
    return caught.value


@pytest.mark.parametrize(
    ("widths", "text", "step"),
    [([4, 5], "return super().forward(x)", "run_eval"), ([4, 6], 'raise ValueError("of a layer")', "run_train")],
)
def test_the_line_of_a_layer(widths: list[int], text: str, step: str) -> None:
    (note,) = (note for note in _error(widths, step).__notes__ if note.startswith("in the model: "))
    assert note.startswith(f"in the model: {__file__}:")
    assert note.endswith(f", in forward: {text}")

"""An error in forward has the innermost line of the model's code, of the spine or of a layer, as in one process."""

import traceback
from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import NxDPPModel
from nxdpp.ranks.faults.mistakes import fold

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


@pytest.mark.parametrize("step", ["run_train", "run_eval"])
@pytest.mark.parametrize(
    ("widths", "text"), [([4, 5], "return super().forward(x)"), ([4, 6], 'raise ValueError("of a layer")')]
)
def test_the_line_of_a_layer(widths: list[int], text: str, step: str) -> None:
    (note,) = (note for note in _error(widths, step).__notes__ if note.startswith("in the model: "))
    assert note.startswith(f"in the model: {__file__}:")
    assert note.endswith(f", in forward: {text}")


def test_frames_of_nxdpp_are_folded_once() -> None:
    error = _error([4, 6], "run_eval")
    for _ in range(2):
        fold(error)
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    assert files[0] == files[-1] == __file__
    assert not any("stage_runner" in file or "eval_with_key" in file for file in files)
    assert sum("are left out of the traceback" in note for note in error.__notes__) == 1


def test_an_error_of_nxdpp_keeps_its_frames() -> None:
    model: Any = NxDPPModel(Model([4, 4]), transformer_layer_cls=Layer, num_microbatches=2)
    with pytest.raises(ValueError, match="batch") as caught:
        model.run_train(x=torch.ones(3, 4))
    before = caught.value.__traceback__
    fold(caught.value)
    assert caught.value.__traceback__ is before


def test_a_graph_of_the_program_itself_keeps_its_frames() -> None:
    def wrong(x: torch.Tensor) -> torch.Tensor:
        return x.view(3)

    graph = torch.fx.symbolic_trace(wrong)
    with pytest.raises(RuntimeError) as caught:
        graph(torch.ones(2))
    before = traceback.format_exception(caught.value)
    fold(caught.value)
    assert traceback.format_exception(caught.value) == before

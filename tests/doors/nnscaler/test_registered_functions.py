"""``register_op``: a function between layers that a trace does not enter."""

from typing import Any

import pytest
import torch
from torch import nn

from nxdpp.doors.nnscaler.policies import layout_of
from nxdpp.nnscaler import ComputeConfig, register_op
from tests.doors.nnscaler.modules import flipped_if_large


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            data = flipped_if_large(layer(data))
        return data.sum()


def test_a_registered_function_is_one_node() -> None:
    config = ComputeConfig(2, 2, use_end2end=True, pas_config={"pipeline_nmicros": 2})

    def layout() -> Any:
        return layout_of("pp", Asking(), {"data": torch.ones(2, 4)}, config)

    with pytest.raises(RuntimeError, match="flipped_if_large"):
        layout()
    assert register_op("a b -> a b", name="flip")(flipped_if_large) is flipped_if_large
    assert layout().cuts == ("layers.1",)

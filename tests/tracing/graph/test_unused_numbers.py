"""Numbers that forward takes for a log are told, once."""

import pytest
import torch

from tests.support.traced_models import PlainLayer, PlainModel, options_for, trace_with

X = torch.full((3, 4), 0.5)


class Appends(PlainModel):
    def __init__(self) -> None:
        super().__init__()
        self.history: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x)
        self.history.append(loss.item())
        return loss


def test_a_number_for_a_log_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        trace_with(Appends(), {"x": X}, options_for(Appends(), PlainLayer))
    (message,) = [record.message for record in caplog.records if "does not compute with it" in record.message]
    assert "self.history.append(loss.item())" in message
    assert "(loss = self.log(loss))" in message

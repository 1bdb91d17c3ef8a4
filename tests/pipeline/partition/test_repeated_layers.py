"""Layers that run several times in one forward are refused, and the remedy of the message is followed."""

import copy

import pytest
import torch
from torch.nn import functional as F

from tests.support.in_process import InProcessPipeline
from tests.support.plain_models import WIDTH, Base, Block
from tests.support.sized_models import train_whole


class Preferences(Base):
    """Chosen and rejected rows, through the layers one after the other."""

    def score(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.through(self.blocks, self.embedding(rows)))
        return result

    def forward(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        return -F.logsigmoid(self.score(chosen) - self.score(rejected)).mean()


class Concatenated(Preferences):
    """The remedy: all rows at once."""

    def forward(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        better, worse = self.score(torch.cat([chosen, rejected])).chunk(2)
        return -F.logsigmoid(better - worse).mean()


def test_one_concatenated_batch() -> None:
    torch.manual_seed(0)
    model = Preferences()
    batch = {"chosen": torch.randn(4, WIDTH), "rejected": torch.randn(4, WIDTH)}
    with pytest.raises(ValueError, match=r"Run several times: \['blocks\.0', .*for all rows \(torch\.cat\) and split"):
        InProcessPipeline(model, 2, transformer_layer_cls=Block)
    remedied = Concatenated()
    remedied.load_state_dict(model.state_dict())
    whole = copy.deepcopy(remedied)

    losses = InProcessPipeline(remedied, 2, transformer_layer_cls=Block).train(batch, 2)

    assert all(map(torch.equal, losses, train_whole(whole, batch, 2)))
    torch.testing.assert_close(torch.stack(losses), torch.stack(train_whole(model, batch, 2)))
    for name, parameter in remedied.named_parameters():
        assert torch.equal(parameter.grad, whole.get_parameter(name).grad), name  # type: ignore[arg-type]
        torch.testing.assert_close(parameter.grad, model.get_parameter(name).grad)

"""Spines as people write them: losses and gradients of the stages are those of one process, to the last bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.exact import assert_exact
from tests.support.plain_models import WIDTH, Base

X = torch.linspace(-1, 1, 4 * 6 * WIDTH).reshape(4, 6, WIDTH)
Forward = Callable[["Spine", Tensor], Any]


class Spine(Base):
    """Blocks around which ``spine`` is the forward."""

    weight: Tensor

    def __init__(self, spine: Forward) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.spine = spine
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("weight", torch.linspace(1, 2, WIDTH))

    def forward(self, x: Tensor) -> Any:
        return self.spine(self, x)

    def hidden(self, x: Tensor) -> Tensor:
        """Hidden states after all blocks, of the shape of ``x``."""
        hidden: Tensor = self.through(self.blocks, self.embedding(x))
        return hidden


class Scaled(nn.Module):
    """A loss that holds a traced value."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.scale = [scale]

    def forward(self, hidden: Tensor) -> Tensor:
        return (hidden * self.scale[0]).square().mean()


def _ignores_an_index(self: Spine, x: Tensor) -> Tensor:
    # As the heads of transformers for question answering do.
    logits = self.head(self.hidden(x)).squeeze(-1)
    positions = x[:, 0, 0].abs().mul(9).long().clamp(0, logits.size(1))
    loss: Tensor = nn.CrossEntropyLoss(ignore_index=logits.size(1))(logits, positions)
    return loss


def _weighs_by_a_buffer(self: Spine, x: Tensor) -> Tensor:
    loss = nn.CrossEntropyLoss(weight=self.weight)
    result: Tensor = loss(self.hidden(x).flatten(0, 1), x.argmax(-1).flatten())
    return result


def _weighs_by_a_made_tensor(self: Spine, x: Tensor) -> Tensor:
    loss = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device))
    result: Tensor = loss(self.hidden(x), (x > 0).float())
    return result


def _weighs_by_a_parameter(self: Spine, x: Tensor) -> Tensor:
    result: Tensor = Scaled(self.scale)(self.hidden(x))
    return result


def _weighs_by_hidden_states(self: Spine, x: Tensor) -> Tensor:
    hidden = self.hidden(x)
    result: Tensor = nn.Sequential(nn.Flatten(0, 1), Scaled(hidden.mean(-2)[:1]))(hidden)
    return result


@pytest.mark.parametrize(
    "spine",
    [
        _ignores_an_index,
        _weighs_by_a_buffer,
        _weighs_by_a_made_tensor,
        _weighs_by_a_parameter,
        _weighs_by_hidden_states,
    ],
)
def test_a_module_made_in_forward_holds_traced_values(spine: Forward) -> None:
    assert_exact(Spine(spine), {"x": X}, "Block")

"""Random functions of inputs alone, used on two stages: both see one draw."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.in_process import InProcessPipeline
from tests.support.plain_models import Base, Block

FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5)[0],
    "a function": lambda x: F.dropout(x, 0.5),
    "a method": lambda x: torch.empty_like(x).random_(0, 5),
    "a module made in forward": lambda x: nn.Dropout(0.5)(x),
}


class Model(Base):
    """Adds one random value of the inputs before the first block and after the last."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = self.function(x)
        hidden = self.through(self.blocks, self.embedding(x) + noise)
        return self.close(hidden * noise)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_both_stages_use_one_draw(name: str) -> None:
    model = Model(FUNCTIONS[name])
    batch = {"x": torch.rand(4, 4)}
    pipeline = InProcessPipeline(model, 3, batch, transformer_layer_cls=Block)
    torch.manual_seed(1)
    (loss,) = pipeline.train(batch, 1)
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    torch.manual_seed(1)
    expected = model(**batch)
    expected.backward()
    assert torch.equal(loss, expected)
    assert all(torch.equal(g, p.grad) for g, p in zip(gradients, model.parameters(), strict=True))  # type: ignore[arg-type]

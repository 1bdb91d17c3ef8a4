"""Values of which no run on fake tensors tells anything: one that is only compared with ``None`` is checked."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.in_process import InProcessPipeline
from tests.support.traced_models import PlainLayer, PlainModel, options_for


class Unknown(nn.Module):
    """Returns something beside its result; its code cannot run on fake tensors."""

    def __init__(self, returns: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.returns = returns

    def forward(self, x):  # type: ignore[no-untyped-def]
        x.detach().numpy()
        return x * 2, self.returns(x), self.returns(x)


class Model(PlainModel):
    def __init__(self, use: Callable[[Any, Any], Any], returns: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.unknown = Unknown(returns)
        self.use = use
        self.kept: list[Any] = []

    def prepare(self, hidden: Tensor) -> Tensor:
        hidden, *_ = self.use(self, hidden)
        return hidden


def a_stored_item(model: Any, hidden: Any) -> Any:
    out = model.unknown(hidden)
    if (mask := out[1]) is None:
        return out[0], mask
    return out[0] * 3, mask


def with_default(hidden: Any, mask: Any = None) -> Any:
    if mask is None:
        return hidden
    return hidden * 3


def in_a_function(model: Any, hidden: Any) -> Any:
    hidden, mask, _ = model.unknown(hidden)
    return with_default(hidden, mask), None


def given_back(model: Any, hidden: Any) -> Any:
    def unknown(hidden: Any) -> Any:
        return model.unknown(hidden)[1]

    return hidden * (3 if unknown(hidden) is not None else 1), None


COMPARED = [a_stored_item, in_a_function, given_back]


def _loss(use: Callable[[Any, Any], Any], returns: Callable[[Tensor], Any]) -> tuple[Tensor, Tensor]:
    model, x = Model(use, returns), torch.randn(4, 4)
    pipeline = InProcessPipeline(model, 2, {"x": x}, options_for(model, PlainLayer))
    return pipeline.train({"x": x}, 1)[0], model(x)


@pytest.mark.parametrize("use", COMPARED, ids=lambda use: use.__name__)
def test_a_value_that_is_compared_is_exact_or_an_error(use: Callable[[Any, Any], Any]) -> None:
    loss, expected = _loss(use, lambda x: x)
    assert torch.equal(loss, expected)
    with pytest.raises(RuntimeError, match=r"a value between layers is None(.|\n)* at .*test_none_tests\.py:\d+, in "):
        _loss(use, lambda x: None)

"""Questions that plain Python asks of a traced value have the answers of a tensor, or are refused."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nxdpp.tracing.graph.errors import TracingError
from tests.support.exact import assert_exact
from tests.support.in_process import InProcessPipeline
from tests.support.traced_models import PlainLayer, PlainModel

LOCAL = threading.local()
LOCAL.loss = 0


class Model(PlainModel):
    """Changes its hidden states by a function."""

    def __init__(self, change: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.change = change
        self.register_buffer("mean", torch.ones(1))

    def prepare(self, hidden: Tensor) -> Tensor:
        return self.change(self, hidden)  # type: ignore[no-any-return]


def inputs() -> dict[str, Tensor]:
    return {"x": torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(0))}


def its_type(model: Any, h: Any) -> Any:
    return h * 2 if type(h) is Tensor else h


def callable_or_not(model: Any, h: Any) -> Any:
    return h if callable(h) else h * 2


def missing_attributes(model: Any, h: Any) -> Any:
    if hasattr(h, "logits") or hasattr(h, "keys"):
        h = h * 3
    try:
        return h.last_hidden_state
    except AttributeError:
        return getattr(h, "hidden", h) * 2


def a_pattern_of_a_shape(model: Any, h: Any) -> Any:
    match h.shape:
        case (_, 3, _):
            return h * 2
        case _:
            return h


def add_under_two_names(model: Any, h: Any) -> Any:
    new = h.clone()
    other = new
    other += 1
    return new


def add_to_fewer_bits(model: Any, h: Any) -> Any:
    less = h.bfloat16()
    less += h
    return less.float()


def add_to_a_size(model: Any, h: Any) -> Any:
    n = h.size(1)
    m = n
    n += 1
    return h * n + m


def a_number_for_a_tensor(model: Any, h: Any) -> Any:
    return torch.where(h > 0, h, 0)


def discarded_results(model: Any, h: Any) -> Any:
    new = h.clone()
    torch.relu_(new)
    nn.init.zeros_(scale := torch.empty(1))
    return new + scale


EXACT = (
    its_type, callable_or_not, missing_attributes, a_pattern_of_a_shape, add_under_two_names, add_to_fewer_bits,
    add_to_a_size, discarded_results, a_number_for_a_tensor,
)  # fmt: skip


def all_of_them(model: Any, h: Any) -> Any:
    for change in EXACT:
        h = change(model, h)
    return h * 1e-3


def test_a_model_is_exact() -> None:
    assert_exact(Model(all_of_them), inputs(), PlainLayer)


def the_gradient_of_a_weight(model: Any, h: Any) -> Any:
    return h * 2 if model.head.weight.grad is None else h


def the_function_of_a_gradient(model: Any, h: Any) -> Any:
    return h * 2 if h.grad_fn is not None else h


def a_result_in_a_buffer(model: Any, h: Any) -> Any:
    torch.mean(h.detach(), out=model.mean)
    return h * model.mean


def add_to_a_view(model: Any, h: Any) -> Any:
    new = h.clone()
    part = new.real
    part += 1
    return new


def counted_by_a_thread(model: Any, h: Any) -> Any:
    LOCAL.calls = getattr(LOCAL, "calls", 0) + 1
    return h * 2 if LOCAL.calls > 1000 else h


REFUSED = (
    the_gradient_of_a_weight,
    the_function_of_a_gradient,
    a_result_in_a_buffer,
    add_to_a_view,
    counted_by_a_thread,
)


@pytest.mark.parametrize("change", REFUSED)
def test_a_silent_difference_is_refused(change: Callable[[Any, Any], Any]) -> None:
    with pytest.raises(TracingError, match=rf"test_plain_questions\.py:\d+, in {change.__name__}"):
        InProcessPipeline(Model(change), 2, inputs(), transformer_layer_cls=PlainLayer)


class _Pair(PlainLayer):
    def forward(self, x: Tensor) -> Any:
        hidden = super().forward(x) * 2
        return hidden, hidden.mean()


class Pairs(PlainModel):
    """Changes the first item of an output, and then reads the second."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Pair() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        total: Any = 0
        for layer in self.layers:
            output = layer(hidden)
            hidden = output[0]
            hidden += 1
            total += output[1]
        result: Tensor = self.head(hidden).mean() + total
        return result


def test_one_item_of_an_output_may_be_changed() -> None:
    assert_exact(Pairs(), inputs(), _Pair)

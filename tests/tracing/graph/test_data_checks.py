"""Checks of data that only raise run in every step."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.utils.import_utils import torch_compilable_check

from nxdpp.tracing.graph.errors import TracingError
from tests.support.in_process import InProcessPipeline
from tests.support.traced_models import Asserts, PlainLayer, PlainModel, options_for, trace_with

X = torch.ones(3, 4)


class Refuses(PlainModel):
    """Run ``check`` on the input, on the hidden states after the first layer, and on those after the last."""

    def __init__(self, check: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.check = check

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        hidden = self.embedding(x)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden)
            if index == 0:
                self.check(hidden)
        self.check(hidden)
        result: Tensor = self.head(hidden).mean()
        return result


class NoNumbersError(Exception):
    """An error of the model's own."""


class UnusualError(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(first, second)


def _own_error(x: Tensor) -> None:
    if not torch.allclose(x, x):
        raise NoNumbersError("no numbers")


def _unusual_error(x: Tensor) -> None:
    if x.isnan().any().item():
        raise UnusualError(1, 2)


def _several(x: Tensor) -> None:
    for row in range(2):
        if x[row].isnan().any() or not (x[row].isfinite().all()):
            raise ValueError("bad")


def _in_many_forms(x: Tensor) -> int:
    """All forms of a branch that only raises; the last one raises for numbers that are not finite."""
    error = KeyError
    if (x > 1e9).any() or (x < -1e9).any():
        raise TypeError
    if not (x > 1e6).any():
        y = 1
    else:
        shown = [str(part) for part in (1, 2)]
        raise TypeError(f"bad {', '.join(shown)} {'a' if shown else 'b'}" + "end {}".format(shown))  # noqa: UP032
    with contextlib.nullcontext():
        if x.min() < -1e6:
            raise KeyError("bad") from ValueError("inner")
    if x.max() > 1e6:
        raise error("bad")
    if bool(~x.isfinite().all()):
        raise ValueError("bad")
    return y


def _with_torch_assert(x: Tensor) -> None:
    torch._assert(~x.isnan().any(), "not a number")


def _with_torch_check(x: Tensor) -> None:
    torch._check(x.shape[1] < 100)
    torch._check(x.isfinite().all().item(), lambda: "not a number")


def _with_callable_check(x: Tensor) -> None:
    torch_compilable_check(lambda: x.isfinite().all(), "not a number", error_type=NoNumbersError)


CHECKS = [
    (_unusual_error, RuntimeError),
    (_several, ValueError),
    (_in_many_forms, ValueError),
    (_with_torch_assert, AssertionError),
    (_with_torch_check, RuntimeError),
    (_with_callable_check, NoNumbersError),
]


def _cut(model: nn.Module, stages: int) -> InProcessPipeline:
    return InProcessPipeline(model, stages, {"x": X}, options_for(model, PlainLayer))


@pytest.mark.parametrize(("check", "error"), CHECKS)
def test_a_check_changes_nothing_and_raises_where_the_model_does(
    check: Callable[[Tensor], Any], error: type[Exception]
) -> None:
    model = Refuses(check)
    chain = _cut(model, 2)
    assert torch.equal(chain.forward({"x": X}), model(X))
    assert len(chain.boundary_tensors) == 1
    with pytest.raises(error):
        chain.forward({"x": X * torch.nan})
    for name in ("layers.0.linear.weight", "layers.3.linear.weight"):
        weight = model.get_parameter(name)
        before = weight.detach().clone()
        weight.data.fill_(torch.nan)
        with pytest.raises(error):
            chain.forward({"x": X})
        weight.data.copy_(before)


def test_the_error_has_the_text_and_the_line_of_the_model() -> None:
    model = Refuses(_own_error)
    text = r"the model raises for this data: no numbers\n  at .*test_data_checks\.py:\d+, in _own_error: if not torch"
    with pytest.raises(NoNumbersError, match=text):
        _cut(model, 2).forward({"x": X * torch.nan})
    with pytest.raises(RuntimeError, match=r"UnusualError: the model raises for this data\n  at .*_unusual_error"):
        _cut(Refuses(_unusual_error), 2).forward({"x": X * torch.nan})


def _calls(x: Tensor) -> None:
    if x.isnan().any():
        print("bad")
        raise ValueError("bad")


def _is_caught(x: Tensor) -> int:
    try:
        if x.isnan().any():
            raise ValueError("bad")
    except ValueError:
        return 1
    return 2


def _sets_a_variable(x: Tensor) -> int:
    scale = 1
    if x.isnan().any():
        scale = 2
        if x.max() > 5:
            raise ValueError("bad")
    return scale


def _raises_sometimes(x: Tensor, really: bool = False) -> int:
    if x.isnan().any():
        if really:
            raise ValueError("bad")
        return 1
    return 2


@pytest.mark.parametrize(
    "check",
    [
        _calls,
        _is_caught,
        _sets_a_variable,
        _raises_sometimes,
    ],
)
def test_another_decision_that_depends_on_data_is_refused(check: Callable[[Tensor], Any]) -> None:
    model = Refuses(check)
    with pytest.raises(TracingError, match=r"only the data tells.*\n  at .*test_data_checks\.py:\d+, in _\w+: if x"):
        trace_with(model, {"x": X}, options_for(model, PlainLayer))


@pytest.mark.parametrize(
    ("x", "line"),
    [(-X, r"x must be positive\n.* assert torch\.all\(x > 0\)"), (X / 0, r"hold\n.* assert hidden\.isfinite\(\)")],
    ids=["of the inputs", "of a later stage"],
)
def test_an_assertion_that_does_not_hold_is_raised(x: Tensor, line: str) -> None:
    model = Asserts()
    chain = _cut(model, 2)
    assert torch.equal(chain.forward({"x": X}), model(X))
    with pytest.raises(AssertionError, match=rf"an assertion of the model does not {line}|does not hold: {line}"):
        chain.forward({"x": x})

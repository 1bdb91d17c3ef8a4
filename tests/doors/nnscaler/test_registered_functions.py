"""``register_op``: a function between layers that a trace does not enter."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nxdpp.doors.nnscaler.policies import layout_of
from nxdpp.nnscaler import ComputeConfig, register_op
from tests.doors.nnscaler import modules
from tests.doors.nnscaler.modules import flipped_if_large


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            data = flipped_if_large(layer(data))
        return data.sum()

    def ask(self) -> None:
        pass


class AskingByModule(Asking):
    def forward(self, data: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            data = modules.flipped_if_large(layer(data))
        return data.sum()


def test_a_registered_function_is_one_node() -> None:
    config = ComputeConfig(2, 2, use_end2end=True, pas_config={"pipeline_nmicros": 2})

    def layout(kind: type[nn.Module] = Asking) -> Any:
        return layout_of("pp", kind(), {"data": torch.ones(2, 4)}, config)

    with pytest.raises(RuntimeError, match="flipped_if_large"):
        layout()
    assert register_op("a b -> a b", name="flip")(flipped_if_large) is flipped_if_large
    assert layout().cuts == ("layers.1",)
    assert layout(AskingByModule).cuts == ("layers.1",)


def test_autograd_functions_stay_as_they_are() -> None:
    class Twice(torch.autograd.Function):
        pass

    assert register_op(lambda *args: "a -> a")(Twice) is Twice


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: register_op(3), TypeError, "annotation must be text, .* or a function, not 3"),  # type: ignore[arg-type]
        (lambda: register_op("a -> a")(3), TypeError, "register_op takes a function, not 3"),  # type: ignore[type-var]
        (
            lambda: register_op("a -> a", code_impl_pattern="text"),
            ValueError,
            "must be 'import' or 'source', not 'text'",
        ),
        (lambda: register_op("a -> a")(Asking.ask), ValueError, r"Asking.ask is of a class, .* a function of a module"),
        (lambda: register_op("a -> a", emit_fn=str), ValueError, "emit_fn writes generated code, .* leave it out"),
    ],
)
def test_refusals(call: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()

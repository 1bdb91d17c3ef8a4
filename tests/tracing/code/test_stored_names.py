"""The code of forwards, and all that it calls, tells which attributes a run stores."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import dynamic_rope_update

from nxdpp.tracing.code.stored_names import stored_names


def doubled(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(self: Any, x: torch.Tensor) -> Any:
        self.decorated = x
        return function(self, x)

    return call


def helper(module: Any, x: torch.Tensor) -> None:
    module.by_helper = x


class Storing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.at_construction = 1

    @doubled
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.a, self.b = x, [self.compute(i) for i in range(2)]
        helper(self, x)
        setattr(self, "by_string", x)  # noqa: B010
        return x

    def compute(self, i: int) -> int:
        self.in_a_method = i
        return i

    def train(self, mode: bool = True) -> Any:
        self.at_train = mode
        return super().train(mode)


def test_names_of_forward_of_methods_that_it_calls_of_helpers_and_of_decorators() -> None:
    stored = stored_names([Storing()])
    assert stored.on_self == {Storing: {"a", "b", "in_a_method", "by_string", "decorated"}}
    assert stored.on_others == {"by_helper"}


def test_a_name_that_is_put_together_is_of_the_module_it_is_set_on() -> None:
    class Named(nn.Module):
        def forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
            prefix = f"{name}_seen"
            setattr(self, prefix, x)
            return x

    stored = stored_names([Named(), nn.Linear(2, 2)])
    assert stored.stores(Named(), "last_seen")
    assert not stored.on_others


class Rotary(nn.Module):
    @dynamic_rope_update  # type: ignore[untyped-decorator]
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return x


def test_transformers_stores_frequencies_for_types_of_layers_and_nothing_else() -> None:
    module = Rotary()
    found = stored_names([module])

    assert found.stores(module, "full_attention_inv_freq")
    assert found.stores(module, "full_attention_max_seq_len_cached")
    assert not found.stores(module, "mrope_section")
    assert not found.stores(module, "layer_types")

"""The code of forwards, and all that it calls, tells which attributes a run stores."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_rope_utils import dynamic_rope_update

from nxdpp.tracing.code.stored_names import stored_names
from nxdpp.tracing.modules.layers import find_layer_classes, layer_names
from nxdpp.tracing.modules.spine_modules import spine_names
from tests.support.traced_models import make_model


def names(module: nn.Module) -> set[str]:
    return set(stored_names(module.modules()).of(module))


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


def test_a_name_on_another_object_may_be_of_any_module() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner: Any = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> Any:
            self.inner.last = x
            return self.inner(x)

    outer = Outer()
    stored = stored_names(outer.modules())
    assert stored.of(outer.inner) == {"last"}
    assert not stored.has_from_construction(outer, "last")


def test_a_hook_stores_on_any_module() -> None:
    linear = nn.Linear(2, 2)
    linear.register_forward_hook(lambda module, args, output: setattr(module, "seen", output))
    assert names(linear) == {"seen"}


def test_a_forward_of_a_module_of_its_own() -> None:
    module = Storing()
    apply = functools.partial(lambda function, x: function(x), module.forward)
    module.forward = apply  # type: ignore[method-assign]
    assert stored_names([module]) == stored_names([Storing()])


def test_only_a_constructor_makes_an_attribute_before_the_first_run() -> None:
    stored = stored_names([module := Storing()])
    assert stored.has_from_construction(module, "at_construction")
    assert not stored.has_from_construction(module, "a")


def test_layers_of_a_llama_store_nothing() -> None:
    model = make_model("llama")
    layers = layer_names(model, find_layer_classes(model, None))
    leaves = [module for name, module in model.named_modules() if name not in spine_names(model, layers, ())]
    assert {cls.__name__ for cls in stored_names(leaves).on_self} <= {"LlamaRotaryEmbedding"}
    assert not stored_names(leaves).on_others


class Patched(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_a_method_that_is_replaced_later_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Patched()
    assert names(module) == set()

    def inner(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.auxiliary = x.square()
        return x

    monkeypatch.setattr(Patched, "inner", inner)
    assert names(module) == {"auxiliary"}


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


class StoringByOtherCalls(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.register_buffer(tensor=x, name="by_keyword")
        self.alias(x)
        self.starred(self, "by_star", x)
        return x

    def alias(self, x: torch.Tensor) -> None:
        put = setattr
        put(self, "by_alias", x)

    def starred(self, *arguments: Any) -> None:
        setattr(*arguments)


def test_names_of_keywords_and_of_functions_under_another_name() -> None:
    stored = stored_names([StoringByOtherCalls()])
    assert "by_keyword" in stored.of(StoringByOtherCalls())
    assert "by_alias" in stored.on_others
    assert stored.stores(StoringByOtherCalls(), "by_star")

"""The state that code can reach is found by the names in the code, compared and put back."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from nxdpp.tracing.state.reachable_state import DataWalk, ReachableState, differences, has_user_code


class Layer(nn.Module):
    def forward(self, x: Any) -> Any:
        return x


class Spine(nn.Module):
    """Reads a list, a dict and an object."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer()])
        self.items: Any = [1, [2]]
        self.mapping: Any = {"a": {"b": [1]}, "c": (1, [2])}
        self.settings: Any = SimpleNamespace(deep=SimpleNamespace(n=1))

    def forward(self, x: Any) -> Any:
        assert x is not None
        return x * len(self.items) * len(self.mapping) * self.settings.deep.n


def test_circles_and_large_containers_are_walked_once_and_put_back() -> None:
    spine = Spine()
    spine.items.append(spine.items)
    spine.mapping["large"] = list(range(100_000))
    spine.settings.deep.n = spine.settings
    state = ReachableState([spine])
    before = state.snapshot()
    spine.mapping["large"].append(1)
    (change,) = differences(before, state.snapshot())
    assert str(change) == "Spine.mapping['large'] (a list of 100000, then a list of 100001)"
    spine.items[0] = True
    spine.mapping["c"][1].clear()
    assert {change.name for change in differences(before, state.snapshot())} == {"items", "mapping"}
    before.restore()
    assert not differences(before, state.snapshot())
    assert len(spine.mapping["large"]) == 100_000


def test_the_calls_that_pytest_writes_into_an_assertion_are_not_walked() -> None:
    """They reach its configuration and the reports of all tests."""
    found = ReachableState([Spine()]).snapshot()
    assert list(found.functions) == [Spine.forward]
    assert not [path for path, _ in found.keys if "pytest" in path]


def test_nothing_of_torch_and_transformers_is_code_of_the_user() -> None:
    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=8)
    llama = LlamaForCausalLM(config)
    assert not has_user_code([llama, llama.model, llama.model.layers])
    assert not has_user_code([nn.Sequential(Layer())])
    assert has_user_code([llama, Spine()])
    llama.register_forward_hook(lambda module, inputs, output: output)
    assert has_user_code([llama])


def test_data_are_compared_without_changes_of_tensors_in_place() -> None:
    tensor = torch.zeros(2)
    data: dict[str, Any] = {"given": {"x": tensor, "settings": SimpleNamespace(n=1)}}
    before = DataWalk(data)
    tensor.add_(1)
    assert not differences(before, DataWalk(data))
    data["given"]["settings"].n = 2
    assert differences(before, DataWalk(data))

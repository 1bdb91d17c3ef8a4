"""``apply_checkpoint``: the same loss and gradients with fewer activations in memory."""

from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as torch_checkpoint

from nxdpp import NxDPPModel, apply_checkpoint, parallel_state
from tests.pipeline.in_turn import run_in_turn
from tests.support.kept_messages import KeptMessages
from tests.support.models import gradient_differences, make, padded_batch, reference, train_in_one_process


class Counter:
    """Number of runs of each layer of a wrapped model."""

    def __init__(self, wrapped: NxDPPModel) -> None:
        self.calls = dict.fromkeys(wrapped.stage_layers, 0)
        modules = dict(wrapped.local_named_modules())
        for name in wrapped.stage_layers:
            attention = next(child for key, child in modules[name].named_children() if "attn" in key)
            attention.register_forward_hook(self._counting(name))

    def _counting(self, name: str):  # type: ignore[no-untyped-def]
        def count(*_: object) -> None:
            self.calls[name] += 1

        return count


def checkpoint_layers(rank: int, layers: list[str] | None) -> dict[str, int]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    model = make("llama")
    whole = reference(model)
    wrapped = NxDPPModel(model, num_microbatches=4)
    names = [name for name, _ in wrapped.local_named_parameters()]
    modules = [name for name, _ in wrapped.local_named_modules()]
    for _ in range(2):
        apply_checkpoint(wrapped, layers)
    assert [name for name, _ in wrapped.local_named_parameters()] == names
    assert [name for name, _ in wrapped.local_named_modules()] == modules
    assert list(wrapped.local_state_dict()) == names
    counter = Counter(wrapped)
    batch = padded_batch(8)
    wrapped.run_train(**batch)
    train_in_one_process(whole, batch, 4)
    assert gradient_differences(wrapped, whole) == {}
    return counter.calls


def drop_twice(rank: int) -> list[dict[str, torch.Tensor]]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    gradients = []
    for checkpointed in (False, True):
        wrapped = NxDPPModel(make("gpt2", dropout=0.3), num_microbatches=4)
        if checkpointed:
            apply_checkpoint(wrapped)
        torch.manual_seed(3)
        wrapped.run_train(**padded_batch(8))
        gradients.append({n: p.grad for n, p in wrapped.local_named_parameters() if p.grad is not None})
    return gradients


def collect_warnings(rank: int) -> list[str]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    wrapped = NxDPPModel(make("llama"))
    with pytest.raises(RuntimeError, match="layers_to_checkpoint"):
        apply_checkpoint(wrapped, [])
    messages = KeptMessages().texts
    apply_checkpoint(wrapped, ["model.layers.3"])
    assert messages == [], "a layer of another stage is no mistake"
    apply_checkpoint(wrapped, ["model.layers.7"])
    return messages


def test_gradients_are_those_of_one_process_and_the_named_layers_run_twice() -> None:
    cases = ((checkpoint_layers, None), (checkpoint_layers, ["model.layers.1", "model.layers.2"]))
    first, second = run_in_turn(2, *cases, drop_twice, collect_warnings)
    assert first[:2] == [{"model.layers.0": 8, "model.layers.1": 8}, {"model.layers.0": 4, "model.layers.1": 8}]
    assert second[:2] == [{"model.layers.2": 8, "model.layers.3": 8}, {"model.layers.2": 8, "model.layers.3": 4}]
    for *_, (plain, checkpointed), messages in (first, second):
        assert plain.keys() == checkpointed.keys()
        assert all(torch.equal(gradient, checkpointed[name]) for name, gradient in plain.items())
        assert len(messages) == 1
        assert "model.layers.7" in messages[0]


class ByKeyword(nn.Module):
    def forward(self, *, hidden: Tensor, others: dict[str, Tensor]) -> Tensor:
        return hidden * 2 + others["bias"]


class _KeptError(Exception):
    """The random states have been asked for."""


def test_the_random_state_of_the_device_of_tensors_by_keyword_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: set[str] = set()

    def keep(*args: Any) -> None:
        devices.update(value.device.type for value in pytree.tree_leaves(args) if isinstance(value, Tensor))
        raise _KeptError

    monkeypatch.setattr(torch_checkpoint, "_get_device_module", lambda device: SimpleNamespace(_initialized=True))
    monkeypatch.setattr(torch_checkpoint, "get_device_states", keep)
    layer = ByKeyword()
    apply_checkpoint(cast(Any, wrapped_layer(layer)))
    inputs = {"hidden": torch.ones(2, device="meta", requires_grad=True), "others": {"bias": torch.ones(2)}}
    with suppress(_KeptError):
        layer(**inputs)
    assert devices == {"meta"}

    monkeypatch.undo()
    value = layer(hidden=torch.ones(2, requires_grad=True), others={"bias": torch.ones(2)})
    assert torch.equal(value, torch.full((2,), 3.0))


def wrapped_layer(layer: nn.Module) -> SimpleNamespace:
    """A wrapped model of one layer."""
    return SimpleNamespace(
        rank=0,
        layers=["0"],
        stage_layers=["0"],
        original_module=nn.Sequential(layer),
        local_named_modules=lambda: [("0", layer)],
    )

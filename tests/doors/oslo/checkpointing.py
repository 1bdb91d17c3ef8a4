"""Gradients under activation checkpointing, and checks that several ranks run."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import nxdpp.oslo as oslo
from nxdpp.doors.oslo import activation_checkpointing
from tests.doors.oslo.training import LENGTH, ROWS, batch, gpt2


def config(tensor: int = 1, pipeline: int = 1, **keys: bool) -> dict[str, Any]:
    """Return a configuration with activation checkpointing by ``keys``."""
    sizes = {"enable": True, "tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    return {"model_parallelism": sizes, "activation_checkpointing": {"enable": True, **keys}}


def gradients_of(model: Any) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients of a step in which autograd keeps the second result in bytes, where no hook of the model's own does."""
    kept = 0

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.nbytes if not isinstance(tensor, nn.Parameter) else 0
        return tensor

    model.zero_grad()
    torch.manual_seed(3)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(**batch(0, 0)).loss
    loss.backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}, kept


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Return whether both have the same gradients, to the bit."""
    return list(found) == list(expected) and all(torch.equal(found[name], expected[name]) for name in found)


def noted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the list of what is kept from now on with ``cpu_checkpointing`` or ``partitioned_checkpointing``."""
    kept: list[Any] = []
    original = activation_checkpointing._kept

    def note(*args: Any) -> Any:
        kept.append(original(*args))
        return kept[-1]

    monkeypatch.setattr(activation_checkpointing, "_kept", note)
    return kept


def check_several_ranks(tensor: int, pipeline: int) -> None:
    """Compare gradients with those of the same model without checkpointing; collective."""
    plain = oslo.initialize(gpt2(), {"model_parallelism": config(tensor, pipeline)["model_parallelism"]})
    expected, _ = gradients_of(plain)
    choices = ["cpu_checkpointing"]
    if tensor > 1:
        choices = ["partitioned_checkpointing", "contiguous_checkpointing", *choices]
    with pytest.MonkeyPatch.context() as monkeypatch:
        kept = noted(monkeypatch)
        for count in range(len(choices) + 1):
            kept.clear()
            keys = dict.fromkeys(choices[:count], True)
            assert equal(gradients_of(oslo.initialize(gpt2(), config(tensor, pipeline, **keys)))[0], expected)
            shapes = [each.values.shape for each in kept if each.values.dim() == 3]
            # Each layer of this rank keeps its hidden states.
            assert shapes == [(ROWS, LENGTH, 16 // tensor)] * (4 // pipeline if keys else 0)

"""Calls that no tracer goes through: compiled and scripted functions, and checkpoints of layers."""

import functools

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support.exact import assert_exact
from tests.support.traced_models import PlainLayer, PlainModel

X = torch.linspace(-1, 2, 16).view(4, 4)


def scripted(x: Tensor) -> Tensor:
    if bool(x.sum() > 0):
        return x * 2
    return x


SCRIPTED = torch.jit.script(scripted)


@torch.compile(backend="eager")
def compiled(x: Tensor) -> Tensor:
    return torch.tanh(x) * 2


@functools.wraps(compiled)
def decorated(x: Tensor) -> Tensor:
    return compiled(x)


class Calls(PlainModel):
    def prepare(self, hidden: Tensor) -> Tensor:
        result: Tensor = decorated(compiled(SCRIPTED(hidden)))
        return result


def test_compiled_and_scripted_functions_are_single_nodes() -> None:
    assert_exact(Calls(), {"x": X}, PlainLayer)


class RecomputesLater(PlainModel):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False)
        result: Tensor = self.head(hidden).mean()
        return result


def test_a_checkpoint_of_layers_is_exact_and_told(caplog: pytest.LogCaptureFixture) -> None:
    assert_exact(RecomputesLater(), {"x": X}, PlainLayer)
    (message,) = (record for record in caplog.messages if "checkpoint" in record)
    assert "test_compiled_calls.py" in message
    assert "nxdpp.apply_checkpoint(model) once after wrapping" in message

"""Column-parallel layers with one input: messages, and gradients whatever the code around them does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from nxdpp import parallel_state, tensor_parallelize
from nxdpp.devices.collective_bytes import sent_bytes
from tests.pipeline.backward.split_and_plain import compare
from tests.support.run_ranks import run_ranks
from tests.support.tensor_models import gradient_distance, make

SIZE = 8
STYLES = {"query": "colwise", "key": "colwise", "value": "colwise", "out": "rowwise"}
PLAN = {f"{layer}.{name}": style for layer in (0, 1) for name, style in STYLES.items()}
Run = Callable[["_Attention", torch.Tensor], torch.Tensor]


class _Attention(nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIZE)
        self.query, self.key, self.value, self.out = (nn.Linear(SIZE, SIZE, bias=n != 1) for n in range(4))
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.out(self.run(self, x))
        return y


def _plain(self: _Attention, x: torch.Tensor) -> torch.Tensor:
    hidden = self.norm(x)
    y: torch.Tensor = self.query(hidden).relu_() * self.key(hidden) + self.value(hidden)
    return y


def _other_input(self: _Attention, x: torch.Tensor) -> torch.Tensor:
    hidden, other = self.norm(x), x.tanh()
    y: torch.Tensor = self.query(hidden) * self.key(other) + self.value(other)
    return y


def _twice(self: _Attention, x: torch.Tensor) -> torch.Tensor:
    hidden = self.norm(x)
    y: torch.Tensor = self.query(hidden) * self.query(hidden) + self.key(hidden)
    return y


def _changed_in_place(self: _Attention, x: torch.Tensor) -> torch.Tensor:
    hidden = self.norm(x)
    query = self.query(hidden)
    hidden.mul_(2)
    y: torch.Tensor = query * self.key(hidden)
    return y


def _recomputed(self: _Attention, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = checkpoint(_plain, self, x, use_reentrant=False)
    return y


RUNS = (_plain, _other_input, _twice, _recomputed)


def _x(seed: int = 1) -> torch.Tensor:
    return torch.randn(4, 2, SIZE, generator=torch.Generator().manual_seed(seed))


def _model(run: Run, frozen: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(_Attention(run), _Attention(run))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or "norm" in name)
    return model


def _compare(run: Run, frozen: bool = False) -> float:
    """Bytes of a backward in all-reduces of one input, after the comparison with one process."""
    model, whole = _model(run, frozen), _model(run, frozen)
    tensor_parallelize(model, PLAN)
    results = []
    for each in (model, whole):
        x = _x().requires_grad_()
        output = each(x)
        with sent_bytes() as sent:
            output.square().sum().backward()
        results.append((output.detach(), x.grad, sent.total))
    (output, gradient, total), (expected, theirs, _) = results
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(gradient, theirs)
    trained = {name: each for name, each in model.named_parameters() if each.grad is not None}
    assert trained.keys() == {name for name, each in whole.named_parameters() if each.grad is not None}
    assert gradient_distance(trained, whole) < 1e-5
    return total / _x().nbytes


def _cases(rank: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    for run in RUNS:
        for frozen in (False, True):
            assert _compare(run, frozen) >= 2, run
    for frozen in (False, True):
        assert _compare(_plain, frozen) == 2
    # Autograd refuses the change where the layers are trained.
    _compare(_changed_in_place, frozen=True)
    found = compare(tensor_parallelize(_model(_plain), PLAN), [[_x(seed)] for seed in range(4)])
    assert found.analyses == 1
    parallel_state.destroy_model_parallel()


def test_gradients() -> None:
    run_ranks(2, _cases)


@pytest.mark.usefixtures("one_of_two")
def test_four_all_reduces_of_a_layer() -> None:
    """Two in the forward, of attention and feed-forward, and two in the backward: the least."""
    with FakeTensorMode():
        model: Any = tensor_parallelize(make("llama"))
        layer = model.model.layers[0]
        x = torch.empty(4, 8, 32, requires_grad=True)
        positions = model.model.rotary_emb(x, torch.arange(8)[None])
        with sent_bytes() as sent:
            layer(x, position_embeddings=positions).sum().backward()
    # An all-reduce of two ranks sends each byte once.
    assert sent.total == 4 * x.nbytes

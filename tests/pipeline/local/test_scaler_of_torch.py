"""torch's ``GradScaler`` is refused for a pipelined model."""

import pytest
import torch
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from tests.support.run_ranks import run_ranks


class Layer(nn.Linear):
    """A layer."""


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(4, 4) for _ in range(4)))


def train(rank: int) -> str:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    rows, targets = torch.randn(4, 4), torch.randn(4, 4)
    batch = {"input": rows, "target": targets}
    model = NxDPPModel(build(), Layer, num_microbatches=2, loss_fn=nn.MSELoss(), broadcast_and_average_loss=True)
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model.run_train(**batch))
    with pytest.raises(RuntimeError) as caught:
        scaler.step(optimizer)
    # One that is off, and one of a model of its own, step.
    model.run_train(**batch)
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
    other = build()
    other(rows).sum().backward()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(torch.optim.SGD(other.parameters(), lr=0.1))
    return str(caught.value)


def test_the_scaler_of_torch_is_refused_with_the_remedy() -> None:
    for told in run_ranks(2, train):
        assert "divided the gradients of SGD by its scale of 65536" in told
        assert "give it to NxDPPModel(..., grad_scaler=scaler)" in told

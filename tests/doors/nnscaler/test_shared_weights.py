"""A weight that the stages of a pipeline share, divided over the ranks of a stage or on each of them: one process."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nxdpp import parallel_state
from nxdpp.nnscaler import ComputeConfig, ParallelModule, build_optimizer
from tests.doors.nnscaler.own_folders import parallelize
from tests.support.run_ranks import run_ranks

RANKS, SAMPLES, WIDTH = 4, 4, 16


class Product(nn.Module):
    """A raw parameter, which every rank of a stage computes with."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def projection(weight: nn.Parameter) -> nn.Linear:
    """A linear layer, whose output features the ranks of a stage share."""
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    layer.weight = weight
    return layer


class Repeated(nn.Module):
    """Several layers of one weight. Returns the loss, or the loss and its values without a gradient."""

    def __init__(self, kind: Callable[[nn.Parameter], nn.Module], layers: int, returns_two: bool) -> None:
        super().__init__()
        weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.layers = nn.ModuleList(kind(weight) for _ in range(layers))
        self.returns_two = returns_two

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        loss = x.sum()
        return (loss, loss.data) if self.returns_two else loss


def sample(unit: int, number: int) -> torch.Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * unit + number))


def stages(graph: Any, config: ComputeConfig) -> Any:
    """Cut after each layer; the ranks that are left share each layer."""
    count = len(graph.layers)
    graph.divide(config.plan_ngpus // count)
    graph.cut_after(graph.layers[:-1])
    graph.schedule("1f1b", stages=count, microbatches=SAMPLES)
    return graph


def compared(
    rank: int, kind: Callable[[nn.Parameter], nn.Module], layers: int, plan_ngpus: int, returns_two: bool
) -> None:
    torch.manual_seed(0)
    expected = Repeated(kind, layers, returns_two)
    config = ComputeConfig(plan_ngpus, RANKS, use_end2end=True)
    model = parallelize(expected, {"x": sample(0, 0)}, stages, config)
    assert isinstance(model, ParallelModule)
    optimizer: Any = build_optimizer(model, torch.optim.SGD, lr=0.01)
    unit = rank // plan_ngpus
    outputs = model.train_step([sample(unit, number) for number in range(SAMPLES)])
    for each in range(RANKS // plan_ngpus):
        for number in range(SAMPLES):
            output = expected(sample(each, number))
            if each == unit:
                torch.testing.assert_close(outputs[number], output)
            (output[0] if returns_two else output).backward()
    optimizer.sync_shard_grad()
    whole = next(expected.parameters())
    assert whole.grad is not None
    (own,) = model.parameters()
    assert own.grad is not None
    rows = own.shape[0]
    # A rank of a divided stage has rows of the weight.
    assert rows == (WIDTH // (plan_ngpus // layers) if kind is projection else WIDTH)
    first = rank % (WIDTH // rows) * rows
    torch.testing.assert_close(own.grad, whole.grad[first : first + rows])
    optimizer.step()
    torch.testing.assert_close(own.detach(), (whole - 0.01 * whole.grad).detach()[first : first + rows])
    parallel_state.destroy_model_parallel()


def run_cases(rank: int) -> None:
    compared(rank, Product, 2, 2, False)
    compared(rank, Product, 2, 4, True)
    compared(rank, Product, 4, 4, False)
    compared(rank, projection, 2, 4, False)


def test_gradients_are_those_of_one_process() -> None:
    run_ranks(RANKS, run_cases)

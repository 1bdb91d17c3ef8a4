"""Speed of this machine from single operations and single collectives; no layout is measured for it.

Ranks measure at the same time, one a core, as they compute in a step.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.optim import AdamW

from benchmarks.layouts.job import FLOAT, Shape
from benchmarks.planner.cores import stay_on_core
from nxdpp import NxDPPModel, parallel_state
from nxdpp.devices.collective_bytes import least_sent
from nxdpp.planning.machine import DeviceSpeed, Link, Machine
from tests.support.run_ranks import run_ranks

_SECONDS = 0.1
_ACTIONS = 64
# Times that AdamW reads or writes a tensor of the size of the parameters, as the planner counts.
_OPTIMIZER_PASSES = 20
_MESSAGES = (2**16, 2**23)
_REPEATS = 100


class Speed(NamedTuple):
    """Figures of a core, and of a link between two ranks.

    Attributes:
        flops: FLOPs a second of the products of a layer.
        bandwidth: bytes a second that other operations read and write.
        operation: seconds of an operation of one number.
        action: seconds that the runtime takes for an action.
        rate: bytes a second that a rank sends in an all-reduce.
        latency: seconds of one of the two steps of an all-reduce of one number, after a product of a layer.
    """

    flops: float
    bandwidth: float
    operation: float
    action: float
    rate: float
    latency: float

    def machine(self, devices: int, memory: int, cores: int) -> Machine:
        """Return a machine of ``devices`` ranks on ``cores`` cores."""
        device = DeviceSpeed("cpu", {FLOAT: self.flops}, 1.0, self.bandwidth, self.operation, self.action)
        link = Link(self.rate, self.latency)
        return Machine(devices, memory, device, link=link, host_link=link, cores=cores)


def calibrate(shape: Shape, cores: int) -> Speed:
    """Return the mean speed of ``cores`` ranks that measure at once."""
    ranks: list[Speed] = run_ranks(cores, measure, shape, timeout=120.0)
    return Speed(*(statistics.fmean(figures) for figures in zip(*ranks, strict=True)))


def measure(rank: int, shape: Shape) -> Speed:
    """Measure one rank; for ``run_ranks``."""
    torch.set_num_threads(1)
    stay_on_core(rank)
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=1)
    speed = Speed(_flops(shape), _bandwidth(shape), _operation(), _action(), *_link(shape))
    parallel_state.destroy_model_parallel()
    return speed


def _flops(shape: Shape) -> float:
    """Return the rate of forward, input-gradient and weight-gradient of a layer's products, for 1 and 2 samples."""
    flops = seconds = 0.0
    pairs = ((shape.hidden, shape.hidden), (shape.hidden, shape.middle), (shape.middle, shape.hidden))
    for rows in (shape.length, 2 * shape.length):
        for inner, outer in pairs:
            x, weight, gradient = torch.randn(rows, inner), torch.randn(outer, inner), torch.randn(rows, outer)
            products = (
                partial(torch.matmul, x, weight.t()),
                partial(torch.matmul, gradient, weight),
                partial(torch.matmul, gradient.t(), x),
            )
            for product in products:
                flops += 2 * rows * inner * outer
                seconds += _median(product)
    return flops / seconds


def _bandwidth(shape: Shape) -> float:
    """Return the harmonic mean of the rates of a few operations: each moves the same number of bytes."""
    one, two = torch.randn(2, 2 * shape.length, shape.middle).unbind()
    scores = torch.randn(2, shape.heads, shape.length, shape.length)
    parameters = [nn.Parameter(torch.randn(shape.hidden, shape.middle)) for _ in range(8)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    operations: list[tuple[int, Callable[[], object]]] = [
        (3 * one.nbytes, lambda: one + two),
        (3 * one.nbytes, lambda: one * two),
        (2 * one.nbytes, lambda: functional.silu(one)),
        (2 * scores.nbytes, lambda: scores.softmax(-1)),
        (_OPTIMIZER_PASSES * sum(each.nbytes for each in parameters), AdamW(parameters).step),
    ]
    return statistics.harmonic_mean([size / _median(operation) for size, operation in operations])


def _operation() -> float:
    """Return the seconds of one of several operations of one number, each with its backward."""
    x = torch.ones(1, requires_grad=True)
    count = 16

    def forward_and_backward() -> None:
        y = x
        for _ in range(count):
            y = y * x
        y.backward()

    return _median(forward_and_backward) / (3 * count)


class _Nothing(nn.Module):
    """A model without work: its step is only the runtime's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1, 1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean()


def _action() -> float:
    """Return the seconds of a forward or a backward of the runtime for a model without work."""
    model = NxDPPModel(
        _Nothing(), transformer_layer_cls=nn.Linear, num_microbatches=_ACTIONS, output_loss_value_spec=True
    )
    x = torch.ones(_ACTIONS, 1)
    return _mean(lambda: model.run_train(x=x)) / (2 * _ACTIONS)


def _link(shape: Shape) -> tuple[float, float]:
    """Return bytes a second of an all-reduce over all ranks, and the seconds of one of its two steps.

    Ranks compute between their collectives, and wait for the last one then. So each all-reduce follows a product.
    """
    ranks = dist.get_world_size()
    x, weight = torch.randn(2 * shape.length, shape.hidden), torch.randn(shape.middle, shape.hidden)
    product = partial(torch.matmul, x, weight.t())
    alone = _mean(product)
    times = [_mean(product, partial(dist.all_reduce, torch.zeros(size // FLOAT))) - alone for size in _MESSAGES]
    small, large = (least_sent("all_reduce", size, ranks) for size in _MESSAGES)
    rate = (large - small) / max(times[1] - times[0], 1e-9)
    return rate, max(times[0] - small / rate, 0.0) / 2


def _mean(*operations: Callable[[], object]) -> float:
    """Return the mean seconds of ``operations``, run the same number of times on all ranks, without the extremes."""
    times = []
    dist.barrier()
    for _ in range(_REPEATS):
        began = time.perf_counter()
        for operation in operations:
            operation()
        times.append(time.perf_counter() - began)
    return statistics.fmean(sorted(times)[_REPEATS // 10 : -_REPEATS // 10])


def _median(operation: Callable[[], object]) -> float:
    """Return the median seconds of ``operation``."""
    for _ in range(2):
        operation()
    dist.barrier()
    times: list[float] = []
    end = time.perf_counter() + _SECONDS
    while time.perf_counter() < end or len(times) < 3:
        began = time.perf_counter()
        operation()
        times.append(time.perf_counter() - began)
    return statistics.median(times)

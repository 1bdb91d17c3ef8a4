"""One rank of a layout: the bytes that it sends in a step, and the memory that it keeps."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import AdamW, Optimizer

from benchmarks.layouts.allocations import allocated
from benchmarks.layouts.job import Layout, Shape
from benchmarks.layouts.traffic import Traffic
from nxdpp import NxDPPModel, parallel_state
from nxdpp.gradients.optimizer.zero1 import Zero1Optimizer
from nxdpp.tensor.models.parallelize import tensor_parallelize

DIMENSIONS = ("pipeline", "data", "tensor")
_WARM_UP = 2


@dataclass(frozen=True)
class Measured:
    """Figures of one rank.

    Attributes:
        stage: its place in the pipeline.
        sent: bytes of a step by dimension.
        messages: number of collectives and sends of a step by dimension.
        control: bytes of control messages in a step.
        early: share of the gradients whose average began before the end of the last backward.
        parameters, gradients, optimizer: bytes that it keeps between steps.
        peak: most bytes that forward and backward allocate, gradients included.
        optimizer_peak: most bytes that the optimizer's step allocates besides what it keeps.
    """

    stage: int
    sent: dict[str, float]
    messages: dict[str, int]
    control: int
    early: float
    parameters: int
    gradients: int
    optimizer: int
    peak: int
    optimizer_peak: int


def measure_rank(rank: int, layout: Layout, shape: Shape) -> Measured:
    """Train a few steps and measure the last ones; for ``run_ranks``."""
    parallel_state.initialize_model_parallel(layout.tensor, layout.pipeline)
    wrapped, optimizer = make(layout, shape)
    inputs = shape.inputs(parallel_state.get_data_parallel_rank())
    for _ in range(_WARM_UP):
        step(wrapped, optimizer, inputs)
    optimizer.zero_grad()
    with Traffic(groups()) as traffic:
        wrapped.run_train(**inputs)
        optimizer.step()
    early = wrapped.last_average.early_share
    optimizer.zero_grad()
    with allocated() as of_train:
        wrapped.run_train(**inputs)
    with allocated() as of_optimizer:
        optimizer.step()
    measured = Measured(
        parallel_state.get_pipeline_model_parallel_rank(),
        {dimension: traffic.of(dimension) for dimension in (*DIMENSIONS, "other")},
        dict(traffic.messages),
        traffic.control,
        early,
        sum(parameter.nbytes for parameter in wrapped.local_parameters()),
        sum(parameter.grad.nbytes for parameter in wrapped.local_parameters() if parameter.grad is not None),
        state_bytes(optimizer),
        of_train.peak,
        of_optimizer.peak,
    )
    parallel_state.destroy_model_parallel()
    return measured


def make(layout: Layout, shape: Shape) -> tuple[NxDPPModel, Optimizer]:
    """Return the wrapped model, and AdamW over its parameters, sharded with ZeRO-1."""
    model = shape.model()
    if layout.tensor > 1:
        tensor_parallelize(model, sequence_parallel=layout.sequence)
    wrapped = NxDPPModel(model, num_microbatches=shape.microbatches, use_zero1_optimizer=layout.zero1)
    if layout.zero1:
        return wrapped, Zero1Optimizer(wrapped.local_parameters(), AdamW, grad_clipping=False, lr=1e-3)
    return wrapped, AdamW(wrapped.local_parameters(), lr=1e-3)


def step(wrapped: NxDPPModel, optimizer: Optimizer, inputs: dict[str, Any]) -> None:
    """Train one step."""
    optimizer.zero_grad()
    wrapped.run_train(**inputs)
    optimizer.step()


def groups() -> dict[str, str]:
    """Return the dimension of each group of this rank, by the group's name."""
    mesh = parallel_state.get_device_mesh()
    found = {mesh.get_group(dimension).group_name: dimension for dimension in DIMENSIONS}
    return {str(name): dimension for name, dimension in found.items()}


def state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of the moments, without counts of steps."""
    return sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim()
    )

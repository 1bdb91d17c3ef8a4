"""Sizes of tensor, data and ZeRO-1 parallelism around a pipeline, and the bytes that they send."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from nxdpp.parallel_layers import parallel_state
from nxdpp.parallel_layers.collective_bytes import least_sent
from nxdpp.pipeline.cost.layer_costs import StateBytes


@dataclass(frozen=True)
class Dimensions:
    """Sizes beside that of the pipeline.

    Attributes:
        tensor: number of ranks that share each layer.
        data: number of replicas.
        zero1: the replicas share the optimizer state.
    """

    tensor: int = 1
    data: int = 1
    zero1: bool = False

    @property
    def sharded_over(self) -> int | None:
        """Number of replicas that share the optimizer state; ``None`` where each has all of it."""
        return self.data if self.zero1 else None


@dataclass(frozen=True)
class StepTraffic:
    """The least bytes that each rank of a stage sends in a step, by the ring algorithms of ``collective_bytes``.

    Attributes:
        tensor: in collectives of the tensor group, forward and backward of all microbatches.
        average: for the average of the gradients over the replicas. It is 0 with ZeRO-1, which has the next two.
        reduce_scatter: of gradients.
        all_gather: of parameters.
    """

    tensor: float = 0.0
    average: float = 0.0
    reduce_scatter: float = 0.0
    all_gather: float = 0.0


def step_traffic(tensor: float, state: StateBytes, sizes: Dimensions) -> StepTraffic:
    """Return the traffic of a rank whose tensor group costs ``tensor`` bytes and whose parameters are ``state``."""
    # A gradient has the size of its parameter.
    trained = state.gradients
    if sizes.zero1:
        each = least_sent("all_gather", trained, sizes.data)
        return StepTraffic(tensor, reduce_scatter=each, all_gather=each)
    return StepTraffic(tensor, average=least_sent("all_reduce", trained, sizes.data))


@contextmanager
def divided(model: nn.Module, tensor: int) -> Iterator[None]:
    """Divide ``model`` over ``tensor`` ranks, and act as the first of them meanwhile; no process is needed.

    The rule is that of ``tensor_parallelize``. Raises ``ValueError`` for a model that it refuses.
    """
    if tensor == 1:
        yield
        return
    from nxdpp.tensor_parallel.parallelize import tensor_parallelize

    parallel_state.initialize_debug(tensor_model_parallel_size=tensor)
    try:
        tensor_parallelize(model)
        yield
    finally:
        parallel_state.destroy_model_parallel()

"""Traffic of tensor groups and replicas around a pipeline, and a model that a tensor group divides."""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from nxdpp.devices.collective_bytes import least_sent
from nxdpp.pipeline.partition.layer_costs import StateBytes
from nxdpp.planning.layout import Dimensions
from nxdpp.ranks import parallel_state
from nxdpp.tensor.sequence_parallel import marked


@dataclass(frozen=True)
class StepTraffic:
    """The least bytes that each rank of a stage sends in a step, by the ring algorithms of ``collective_bytes``.

    Attributes:
        tensor: in collectives of the tensor group, forward and backward of all microbatches, and the sum of the
            gradients of parameters that see a part of the sequence.
        average: for the average of the gradients over the replicas. It is 0 with ZeRO-1, which has the next two.
        reduce_scatter: of gradients.
        all_gather: of parameters.
    """

    tensor: float = 0.0
    average: float = 0.0
    reduce_scatter: float = 0.0
    all_gather: float = 0.0


def step_traffic(
    tensor: float, parameters: Iterable[torch.Tensor], state: StateBytes, sizes: Dimensions
) -> StepTraffic:
    """Return the traffic of a rank whose layers send ``tensor`` bytes in their tensor group in a step.

    ``parameters`` are the rank's, and ``state`` has their bytes.
    """
    tensor += least_sent("all_reduce", _summed_bytes(parameters), sizes.tensor)
    # A gradient has the size of its parameter.
    trained = state.gradients
    if sizes.zero1:
        each = least_sent("all_gather", trained, sizes.data)
        return StepTraffic(tensor, reduce_scatter=each, all_gather=each)
    return StepTraffic(tensor, average=least_sent("all_reduce", trained, sizes.data))


def _summed_bytes(parameters: Iterable[torch.Tensor]) -> int:
    """Bytes of the gradients that the tensor group sums once a step, each with a number that says if it is there."""
    distinct = {id(parameter): parameter for parameter in marked(parameters)}.values()
    return sum((parameter.numel() + 1) * parameter.element_size() for parameter in distinct)


@contextmanager
def divided(model: nn.Module, sizes: Dimensions, plan: Mapping[str, str] | None = None) -> Iterator[None]:
    """Divide ``model`` over the tensor group of ``sizes``, and act as its first rank meanwhile; no process is needed.

    ``tensor_parallelize`` divides it, by its ``plan`` if one is given. Raises ``ValueError`` for a model that
    it refuses.
    """
    if sizes.tensor == 1:
        yield
        return
    from nxdpp.tensor.models.parallelize import tensor_parallelize

    parallel_state.initialize_debug(tensor_model_parallel_size=sizes.tensor)
    try:
        with warnings.catch_warnings():
            if plan is not None:
                warnings.simplefilter("ignore")  # the run of the plan compares it
            tensor_parallelize(model, plan, sequence_parallel=sizes.sequence)
        yield
    finally:
        parallel_state.destroy_model_parallel()

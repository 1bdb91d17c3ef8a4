"""State and traffic of tensor groups and replicas around a pipeline, and a model that a tensor group divides."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from nxdpp.devices.collective_bytes import least_sent
from nxdpp.pipeline.partition.layer_costs import StateBytes, state_bytes
from nxdpp.planning.layout import SHARDED, Dimensions
from nxdpp.ranks import parallel_state
from nxdpp.tensor.sequence_parallel import marked


@dataclass(frozen=True)
class StepTraffic:
    """The least bytes that each rank of a stage sends in a step, by the ring algorithms of ``collective_bytes``.

    Attributes:
        tensor: in collectives of the tensor group, forward and backward of all microbatches, and the sum of the
            gradients of parameters that see a part of the sequence.
        average: for the average of the gradients over the replicas. It is 0 with ZeRO, which has the next two.
        reduce_scatter: of gradients.
        all_gather: of parameters.
    """

    tensor: float = 0.0
    average: float = 0.0
    reduce_scatter: float = 0.0
    all_gather: float = 0.0


@dataclass(frozen=True)
class WholeBytes:
    """The most bytes of weights, and of gradients, of a stage that are whole at once with ZeRO-3."""

    weights: int = 0
    gradients: int = 0

    @classmethod
    def of(cls, parameters: Iterable[nn.Parameter], unit: int, rest: int, is_split: bool) -> "WholeBytes":
        """Return the bytes of a stage.

        They are the rest and two layers, and gradients of the rest and one, or all of both in the weight-gradient of a
        split backward.

        Args:
            parameters: of the stage.
            unit: bytes of its largest layer.
            rest: bytes of the parameters of no layer.
            is_split: the schedule splits backwards.
        """
        whole = state_bytes(parameters)
        if is_split:
            return cls(whole.weights, whole.gradients)
        return cls(min(rest + 2 * unit, whole.weights), min(rest + unit, whole.gradients))


def step_traffic(
    tensor: float, parameters: Sequence[nn.Parameter], sizes: Dimensions, microbatches: int, split_share: float
) -> StepTraffic:
    """Return the traffic of a rank with ``parameters`` whose layers send ``tensor`` bytes in a step.

    Their tensor group has these bytes. With ZeRO-3 ``split_share`` of the backwards gather twice.
    """
    tensor += least_sent("all_reduce", _summed_bytes(parameters), sizes.tensor)
    # A gradient has the size of its parameter.
    whole = state_bytes(parameters)
    if not sizes.zero:
        return StepTraffic(tensor, average=least_sent("all_reduce", whole.gradients, sizes.data))
    scatters, gathers = (microbatches, (2 + split_share) * microbatches) if sizes.zero > SHARDED else (1, 1)
    return StepTraffic(
        tensor,
        reduce_scatter=scatters * least_sent("reduce_scatter", whole.gradients, sizes.data),
        all_gather=gathers
        * least_sent("all_gather", whole.weights if sizes.is_sharded else whole.gradients, sizes.data),
    )


def planned_state(parameters: Iterable[nn.Parameter], at_once: WholeBytes, sizes: Dimensions) -> StateBytes:
    """Return the most bytes of the state of ``parameters`` in a step, each once.

    With ZeRO-2 whole weights and gradients count next to the shards, with ZeRO-3 what is whole ``at_once``. A shard is
    of float32 at least.
    """
    distinct = list({id(parameter): parameter for parameter in parameters}.values())
    if not sizes.is_sharded:
        return state_bytes(distinct, sizes.sharded_over)
    whole = state_bytes(distinct)
    weights = -(-_of_float32(distinct) // sizes.data)
    trained = -(-_of_float32(each for each in distinct if each.requires_grad) // sizes.data)
    if sizes.zero == SHARDED:
        return StateBytes(whole.parameters, weights + whole.weights, max(whole.gradients, trained), 2 * trained)
    return StateBytes(whole.parameters, weights + at_once.weights, trained + at_once.gradients, 2 * trained)


def _of_float32(parameters: Iterable[nn.Parameter]) -> int:
    """Return the bytes of ``parameters`` in float32, or in their dtype if it has more bits."""
    return sum(each.numel() * max(each.element_size(), torch.float32.itemsize) for each in parameters)


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

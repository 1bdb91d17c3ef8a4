"""Agreement of the data-parallel replicas before a step of their sharded optimizer."""

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from nxdpp.gradients.optimizer.zero1_state import options_of
from nxdpp.ranks import parallel_state
from nxdpp.ranks.extremes import extremes
from nxdpp.ranks.faults.waits import Wait


class ReplicaPosition(NamedTuple):
    """Numbers that are equal on replicas in the same step.

    Attributes:
        step: number of the step.
        trainings: number of training steps before it.
        layout: hash of the buckets.
        parameters: number of parameters.
        options: hash of the options of the groups.
    """

    step: int
    trainings: int
    layout: int
    parameters: int
    options: int


def hash_of_options(groups: Sequence[dict[str, Any]], settings: Sequence[Any]) -> int:
    """Return a hash of the options of ``groups``, and of ``settings``, that replicas must have alike."""
    options = [
        sorted((key, value) for key, value in group.items() if isinstance(value, bool | int | float | str | tuple))
        for group in map(options_of, groups)
    ]
    return zlib.crc32(repr((options, *settings)).encode())


def present_anywhere(present: Sequence[bool], own: ReplicaPosition) -> list[bool]:
    """Return for each parameter whether it is ``present`` on a replica; collective over the replicas.

    Raises ``RuntimeError`` on all of them unless they have the same position.
    """
    control = parallel_state.get_data_parallel_control_group()
    # The first message has a length that all replicas know.
    smallest, largest = extremes(own, control)
    if smallest != largest:
        raise RuntimeError(_difference(ReplicaPosition(*smallest), ReplicaPosition(*largest)))
    flags = torch.tensor(present, dtype=torch.uint8, device="cpu")
    with Wait("gradients that replicas have", control):
        dist.all_reduce(flags, dist.ReduceOp.MAX, control)
    return [bool(flag) for flag in flags.tolist()]


def _difference(smallest: ReplicaPosition, largest: ReplicaPosition) -> str:
    if (smallest.layout, smallest.parameters) != (largest.layout, largest.parameters):
        return (
            f"the data-parallel replicas give Zero1Optimizer different parameters ({smallest.parameters} and "
            f"{largest.parameters}, of different layouts). Make it with the same parameters, and set the same "
            f"requires_grad, on every replica."
        )
    if smallest.step != largest.step:
        return (
            f"a data-parallel replica is in step {smallest.step} of its Zero1Optimizer, and another in step "
            f"{largest.step}: make each call of step() on every rank."
        )
    if smallest.trainings != largest.trainings:
        return (
            f"a data-parallel replica has made {smallest.trainings} training steps before step {smallest.step} of its "
            f"Zero1Optimizer, and another {largest.trainings}: their gradients belong to different batches. Make each "
            f"call of run_train and of step() on every rank."
        )
    return (
        "the data-parallel replicas have different options in the groups of their Zero1Optimizer, such as lr, or "
        "another max_norm: each would step its part of the parameters by its own. Give a scheduler the same numbers on "
        "every replica (ReduceLROnPlateau: the mean loss of broadcast_and_average_loss=True)."
    )

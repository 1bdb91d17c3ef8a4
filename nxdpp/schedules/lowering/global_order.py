"""Global order of a schedule: one order of the compute actions and transfers of all ranks.

Compute actions are ordered by their start in a simulation in which each takes the same time. A transfer follows the
action that computes its tensor. Every rank runs its own part of this order::

    order     0F0  0→1  1F0  0F1  0→1  1B0  1→0 ...
    rank 0    0F0  send      0F1  send      receive ...
    rank 1         receive  1F0   receive  1B0  send ...
"""

from bisect import bisect_right

from nxdpp.schedules.actions import COMPUTE, Action, ActionKind, Schedule
from nxdpp.schedules.execution import Times, run_in_order

# Note: order on NCCL
#
# On gloo a posted receive is a buffer that waits. On NCCL it is a kernel that occupies the device until its message
# comes. Three things follow:
#
# - NCCL has no tags, and a communicator runs its operations in the order of the calls. Both ends must call in one
#   order.
# - Whatever synchronises the device (an allocation of memory, a copy to the host, the first use of a communicator)
#   waits for that kernel too. A receive that was posted early then holds back the compute action that its sender waits
#   for.
# - Communicators share the hardware's queues. With one queue (CUDA_DEVICE_MAX_CONNECTIONS=1) a kernel that waits stops
#   all that were started after it, whatever their streams.
#
# So receives are not posted ahead, and all ranks follow one order of all compute actions and transfers: each its own
# part. No two ranks can wait for each other. Of all that is not finished, the first in the order has no reason to wait:
# all before it is finished, and each of its ranks has come to it. This holds if each rank waits for the end of each
# transfer before its next action, which is the worst that the three points can do.
#
# Rejected: receives ahead, in groups of sends and receives (`batch_isend_irecv`) over the pipeline. Most families then
# deadlock in the model of tests/schedules/transport_model. Two neighbours have a communicator for each way: with one
# for both, a send to a rank waits for the receive from it.
#
# The average over replicas, gathers of shards and sums of ties run on other communicators, and take their places in the
# list of a rank as actions (`schedules/lowering/additions.py`); replicas start and wait for them in one order.

# Start of a compute action, then an order of the actions that start together.
Key = tuple[float, int, int]


class GlobalOrder:
    """The order of ``schedule``, whose actions ``check`` accepts. The two of a pair start together."""

    def __init__(self, schedule: Schedule) -> None:
        stages = 1 + max(action.stage for actions in schedule for action in actions)
        microbatches = 1 + max(action.microbatch for actions in schedule for action in actions)
        each, transfers = [1.0] * stages, [0.0] * stages
        starts = run_in_order(schedule, stages, microbatches, Times(each, each, each, transfers)).starts
        keyed = [
            [(action, _key(action, start)) for action, start in zip(actions, at, strict=True) if action.kind in COMPUTE]
            for actions, at in zip(schedule, starts, strict=True)
        ]
        self._keys = [[key for _, key in of_rank] for of_rank in keyed]
        # By stage, microbatch and whether it is the forward: the action whose results are sent.
        self._key_of_source = {
            (action.stage, action.microbatch, action.kind is ActionKind.FORWARD): key
            for of_rank in keyed
            for action, key in of_rank
            if action.kind is not ActionKind.WEIGHT_GRADIENT
        }

    def key(self, receive: Action) -> tuple[Key, int]:
        """Return the place of a transfer in the order; ``receive`` names its peer."""
        assert receive.peer is not None, "a receive of the global order has one peer"
        is_activation = receive.kind is ActionKind.RECEIVE_ACTIVATION
        return self._key_of_source[receive.peer, receive.microbatch, is_activation], receive.stage

    def position(self, rank: int, receive: Action) -> int:
        """Return the number of compute actions of ``rank`` that come before the transfer."""
        return bisect_right(self._keys[rank], self.key(receive)[0])


def _key(action: Action, start: float) -> Key:
    # Neighbours that start together: the receive of a result is posted before the action at the same time, and
    # overlaps with it.
    if action.kind is ActionKind.FORWARD:
        return start, 0, action.stage
    return start, 1, -action.stage

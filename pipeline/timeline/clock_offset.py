"""How far the clocks of a pipeline's ranks are apart."""

import time

import torch
import torch.distributed as dist

# Below that of ``same_graph``, above those of everything else that travels in the group.
_TAG = 2**31 - 2
_ROUND_TRIPS = 5


def offset_to_first(group: dist.ProcessGroup) -> int:
    """How many nanoseconds rank 0's ``time.perf_counter_ns`` is ahead of this rank's; collective over ``group``.

    Each rank asks rank 0 a few times what its clock says, one rank after the other, and believes the quickest answer:
    the clock was read somewhere between the question and the answer, in the middle as far as anybody knows (Cristian,
    1989). Where no offset is possible at all, the ranks share a clock, as they do on one machine, and it is 0.

    Args:
        group: takes CPU tensors.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    message = torch.zeros(1, dtype=torch.int64)
    if rank == 0:
        for other in range(1, size):
            for _ in range(_ROUND_TRIPS):
                group.recv([message], other, _TAG).wait()
                message[0] = time.perf_counter_ns()
                group.send([message], other, _TAG).wait()
        return 0
    answers = []
    for _ in range(_ROUND_TRIPS):
        asked = time.perf_counter_ns()
        group.send([message], 0, _TAG).wait()
        group.recv([message], 0, _TAG).wait()
        answered = time.perf_counter_ns()
        answers.append((answered - asked, int(message), (asked + answered) // 2))
    took, theirs, ours = min(answers)
    return offset(took, theirs, ours)


def offset(took: int, theirs: int, ours: int) -> int:
    """The offset from one answer: ``took`` nanoseconds after the question, in the middle of which this clock said
    ``ours``, and the other one, at some time between, ``theirs``."""
    ahead = theirs - ours
    return 0 if abs(ahead) <= took // 2 else ahead

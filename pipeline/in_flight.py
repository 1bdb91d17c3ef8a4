"""How many microbatches a stage keeps activations of."""

from nxdpp.schedules.actions import ActionKind
from nxdpp.schedules.interleaved import INTERLEAVED


def microbatches_in_flight(ranks: int, microbatches: int, chunks: int = 1) -> list[int]:
    """For each stage, of ``chunks`` on each of ``ranks``, the most microbatches between forward and backward.

    Under interleaved 1F1B, which with one chunk a rank is 1F1B. The stages of a rank need not all be at their most at
    the same time.
    """
    peaks = [0] * (ranks * chunks)
    for rank in range(ranks):
        held = dict.fromkeys(range(rank, ranks * chunks, ranks), 0)
        for action in INTERLEAVED.rank_actions(rank, ranks, microbatches, chunks):
            held[action.stage] += 1 if action.kind is ActionKind.FORWARD else -1
            peaks[action.stage] = max(peaks[action.stage], held[action.stage])
    return peaks

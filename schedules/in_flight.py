"""How many microbatches a stage keeps activations of."""

from nxdpp.schedules.actions import ActionKind, Schedule
from nxdpp.schedules.families.interleaved import INTERLEAVED


def microbatches_in_flight(ranks: int, microbatches: int, chunks: int = 1) -> list[int]:
    """``in_flight`` of interleaved 1F1B with ``chunks`` on each of ``ranks``, which with one chunk a rank is 1F1B."""
    return in_flight(INTERLEAVED.build(ranks, microbatches, chunks))


def in_flight(schedule: Schedule) -> list[int]:
    """For each stage the most microbatches that are between their forward and the end of their backward.

    The stages of a rank need not all be at their most at the same time.
    """
    stages = 1 + max(action.stage for actions in schedule for action in actions)
    peaks = [0] * stages
    for actions in schedule:
        held = [0] * stages
        for action in actions:
            if action.kind is ActionKind.FORWARD:
                held[action.stage] += 1
                peaks[action.stage] = max(peaks[action.stage], held[action.stage])
            elif action.kind is not ActionKind.INPUT_GRADIENT:
                held[action.stage] -= 1
    return peaks

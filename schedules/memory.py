"""Peaks of what ranks and stages hold for backwards, over the actions of a schedule: bytes, and microbatches.

A stage holds a microbatch's activations from the end of its forward to the end of its backward. After an
input-gradient it holds the part that the weight-gradient needs, with the gradients of its operations' outputs::

    bytes of stage s     held[s] ________________________
                                 |                       |___________  after_input[s]
                         ________|                       |           |________
                                 F                       I           W
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate

from nxdpp.counted import counted
from nxdpp.schedules.actions import Action, ActionKind, Schedule
from nxdpp.schedules.simulate import in_flight_peaks


def peak_bytes(schedule: Schedule, held: Sequence[float], after_input: Sequence[float]) -> list[float]:
    """Return for each rank the most bytes that its stages hold at once for their microbatches.

    Each stage holds ``held`` bytes for one microbatch from its forward to its backward or input-gradient, and
    ``after_input`` from its input-gradient to its weight-gradient. Raises ``ValueError`` for a list without one number
    for each stage, or for a negative number.
    """
    stages = len({action.stage for actions in schedule for action in actions})
    for name, sizes in (("held", held), ("after_input", after_input)):
        if len(sizes) != stages:
            raise ValueError(
                f"{name} has {counted(len(sizes), 'size')} for {counted(stages, 'stage')}. Give one for each stage."
            )
        if negative := [size for size in sizes if not size >= 0]:
            raise ValueError(f"{name} has a size of {negative[0]} bytes; a size is at least 0.")
    change = {
        ActionKind.FORWARD: list(held),
        ActionKind.BACKWARD: [-size for size in held],
        ActionKind.INPUT_GRADIENT: [after - before for before, after in zip(held, after_input, strict=True)],
        ActionKind.WEIGHT_GRADIENT: [-size for size in after_input],
    }
    return [max(accumulate((change[kind][stage] for stage, kind, _, _ in each), initial=0.0)) for each in schedule]


def in_flight(schedule: Schedule) -> list[int]:
    """Return for each stage the most microbatches between their forward and the end of their backward.

    The stages of a rank may reach their peaks at different times.
    """
    of_stage: defaultdict[int, list[Action]] = defaultdict(list)
    for action in (action for actions in schedule for action in actions):
        of_stage[action.stage].append(action)
    return in_flight_peaks([of_stage[stage] for stage in range(len(of_stage))])

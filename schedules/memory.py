"""Peak of the bytes that a rank holds for backwards, over the actions of a schedule.

A stage holds a microbatch's activations from the end of its forward to the end of its backward. After an
input-gradient it holds the part that the weight-gradient needs, with the gradients of its operations' outputs::

    bytes of stage s     held[s] ________________________
                                 |                       |___________  after_input[s]
                         ________|                       |           |________
                                 F                       I           W
"""

from collections.abc import Sequence

from nxdpp.schedules.actions import ActionKind, Schedule


def peak_bytes(schedule: Schedule, held: Sequence[float], after_input: Sequence[float]) -> list[float]:
    """Return for each rank the most bytes that its stages hold at once for their microbatches.

    Args:
        schedule: compute actions of each rank.
        held: bytes that each stage holds for one microbatch from its forward to its backward or input-gradient.
        after_input: bytes that each stage holds for one microbatch from its input-gradient to its weight-gradient.

    Raises:
        ValueError: for a list that has not one number for each stage, or for a negative number.
    """
    stages = len({action.stage for actions in schedule for action in actions})
    for name, sizes in (("held", held), ("after_input", after_input)):
        if len(sizes) != stages:
            raise ValueError(f"{name} has {len(sizes)} sizes for {stages} stages. Give one for each stage.")
        if negative := [size for size in sizes if not size >= 0]:
            raise ValueError(f"{name} has a size of {negative[0]} bytes; a size is at least 0.")
    change = {
        ActionKind.FORWARD: list(held),
        ActionKind.BACKWARD: [-size for size in held],
        ActionKind.INPUT_GRADIENT: [after - before for before, after in zip(held, after_input, strict=True)],
        ActionKind.WEIGHT_GRADIENT: [-size for size in after_input],
    }
    peaks = []
    for actions in schedule:
        now = peak = 0.0
        for stage, kind, _, _ in actions:
            now += change[kind][stage]
            peak = max(peak, now)
        peaks.append(peak)
    return peaks

"""One forward, one input-gradient, one delayed weight-gradient: the pattern of ZB-H1 and ZB1P.

A rank with 3 warm-up forwards and a delay of 1::

    F0 F1 F2 I0 F3 I1 W0 F4 I2 W1 F5 ...
"""

from nxdpp.schedules.actions import Action, ActionKind
from nxdpp.schedules.families.chunk_groups import ChunkStep, backward_order


def delay_weights(stages: list[int], forwards: list[ChunkStep], warm_up: int, delay: int) -> list[Action]:
    """Return the actions of one rank, which has one of ``stages`` for each chunk.

    ``forwards`` has chunk and microbatch of each forward, in order; backwards have the chunks reversed. ``warm_up``
    forwards come before the first input-gradient, and ``delay`` input-gradients before the first weight-gradient.
    """
    backwards = backward_order(forwards, len(stages))
    actions = [Action(stages[chunk], ActionKind.FORWARD, microbatch) for chunk, microbatch in forwards[:warm_up]]
    for step, (chunk, microbatch) in enumerate(backwards):
        actions.append(Action(stages[chunk], ActionKind.INPUT_GRADIENT, microbatch))
        if step >= delay:
            chunk, microbatch = backwards[step - delay]
            actions.append(Action(stages[chunk], ActionKind.WEIGHT_GRADIENT, microbatch))
        if warm_up + step < len(forwards):
            chunk, microbatch = forwards[warm_up + step]
            actions.append(Action(stages[chunk], ActionKind.FORWARD, microbatch))
    for chunk, microbatch in backwards[max(0, len(backwards) - delay) :]:
        actions.append(Action(stages[chunk], ActionKind.WEIGHT_GRADIENT, microbatch))
    return actions

"""Actions of a rank and their text form: ``2F0`` is stage 2, forward, microbatch 0."""

import re
from collections.abc import Sequence
from enum import Enum
from itertools import pairwise
from typing import NamedTuple


class ActionKind(Enum):
    """Kind of an action; the value is the middle of its text form.

    A backward is full or split. The stage before waits for the input-gradient, no stage for the weight-gradient. A
    release frees what was sent. The kinds after it belong to what takes part in a step beside the stages
    (``lowering.additions``).
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    SEND_ACTIVATION = "SEND_F"
    RECEIVE_ACTIVATION = "RECV_F"
    SEND_GRADIENT = "SEND_B"
    RECEIVE_GRADIENT = "RECV_B"
    RELEASE_ACTIVATION = "FREE_F"
    RELEASE_GRADIENT = "FREE_B"
    GATHER = "GATHER"
    GATHERED = "GATHERED"
    REDUCE = "REDUCE"
    RESHARD = "RESHARD"
    REDUCED = "REDUCED"
    AVERAGE = "AVERAGE"
    AVERAGED = "AVERAGED"
    SUBMIT = "SUBMIT"
    SUM_SEQUENCE = "SUM_SEQUENCE"
    SUM_TIES = "SUM_TIES"
    DISPATCH = "DISPATCH"
    COMBINE = "COMBINE"

    # Members are singletons. Enum's own hash runs in Python, which is slow for long schedules.
    __hash__ = object.__hash__


class Action(NamedTuple):
    """One action on one microbatch of one stage.

    A send belongs to the sending stage, a receive to the receiving stage. ``RECEIVE_*`` only posts the receive; the
    compute action that needs the tensors waits for them. ``peer`` is the stage at the other end. A send or receive
    without a peer is for all stages that ``stage`` exchanges tensors with.
    """

    stage: int
    kind: ActionKind
    microbatch: int
    peer: int | None = None

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind.value}{self.microbatch}"
        return text if self.peer is None else f"{text}@{self.peer}"


COMPUTE = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)
BACKWARDS = COMPUTE[1:]
# An exchange of a participant begins before a compute action and ends after it.
BEGINS = (ActionKind.GATHER, ActionKind.REDUCE, ActionKind.AVERAGE)
ENDS = (ActionKind.GATHERED, ActionKind.RESHARD, ActionKind.AVERAGED)
TRANSFERS = (
    ActionKind.SEND_ACTIVATION,
    ActionKind.RECEIVE_ACTIVATION,
    ActionKind.SEND_GRADIENT,
    ActionKind.RECEIVE_GRADIENT,
    ActionKind.RELEASE_ACTIVATION,
    ActionKind.RELEASE_GRADIENT,
)

# Of participants.
ADDED = tuple(kind for kind in ActionKind if kind not in (*COMPUTE, *TRANSFERS))

# The actions of each rank, in order.
Schedule = list[list[Action]]


def pairs(actions: Sequence[Action]) -> dict[int, int]:
    """Return the places of forwards with a full backward of another stage next, and the places of these backwards.

    The two of a pair fill each other's waits for the tokens of experts (``Family.overlaps``).
    """
    computes = [place for place, action in enumerate(actions) if action.kind in COMPUTE]
    found = {}
    for place, after in pairwise(computes):
        one, other = actions[place], actions[after]
        if (one.kind, other.kind) == (ActionKind.FORWARD, ActionKind.BACKWARD) and one.stage != other.stage:
            found[place] = after
    return found


_COMPUTE = re.compile(r"(\d+)([FBIW])(\d+)")
_KINDS = {kind.value: kind for kind in ActionKind}


def parse_action(text: str) -> Action:
    """Parse a compute action: stage, ``F``, ``B``, ``I`` or ``W``, microbatch; ``ValueError`` for other texts."""
    match = _COMPUTE.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"{text!r} is no action. Write the stage, F (forward), B (full backward), I (input-gradient) or W "
            f"(weight-gradient), and the microbatch: 2F0."
        )
    stage, kind, microbatch = match.groups()
    return Action(int(stage), _KINDS[kind], int(microbatch))

"""The actions of a rank, and their text form (``2F0``: stage 2, forward, microbatch 0)."""

import re
from enum import Enum
from typing import NamedTuple


class ActionKind(Enum):
    """What a rank does; the value is the middle of the text form.

    A backward is full, or split: its input-gradient, which the stage before waits for, and its weight-gradient,
    which nobody waits for.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    SEND_ACTIVATION = "SEND_F"
    RECEIVE_ACTIVATION = "RECV_F"
    SEND_GRADIENT = "SEND_B"
    RECEIVE_GRADIENT = "RECV_B"

    # Members are singletons; Enum's own hashes the name, in Python, and schedules are long.
    __hash__ = object.__hash__


class Action(NamedTuple):
    """One action on one microbatch of one stage.

    A send belongs to the stage that sends, a receive to the stage that receives. ``RECEIVE_*`` only posts the
    receive; the compute action that needs the value waits for it. ``peer`` is the stage at the other end, where a
    send or receive moves what one pair of stages exchanges; without it, all that the stage exchanges.
    """

    stage: int
    kind: ActionKind
    microbatch: int
    peer: int | None = None

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind.value}{self.microbatch}"
        return text if self.peer is None else f"{text}@{self.peer}"


# For each rank, what it does in order.
Schedule = list[list[Action]]

_COMPUTE = re.compile(r"(\d+)([FBIW])(\d+)")
_KINDS = {kind.value: kind for kind in ActionKind}


def parse_action(text: str) -> Action:
    """The compute action that ``text`` writes: stage, ``F``, ``B``, ``I`` or ``W``, microbatch.

    Raises ``ValueError`` for any other text.
    """
    match = _COMPUTE.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"{text!r} is no action. Write the stage, F (forward), B (full backward), I (input-gradient) or W "
            f"(weight-gradient), and the microbatch: 2F0."
        )
    stage, kind, microbatch = match.groups()
    return Action(int(stage), _KINDS[kind], int(microbatch))

"""The actions of a rank, and their text form (``2F0``: stage 2, forward, microbatch 0)."""

from enum import Enum
from typing import NamedTuple


class ActionKind(Enum):
    """What a rank does; the value is the middle of the text form."""

    FORWARD = "F"
    BACKWARD = "B"
    SEND_ACTIVATION = "SEND_F"
    RECEIVE_ACTIVATION = "RECV_F"
    SEND_GRADIENT = "SEND_B"
    RECEIVE_GRADIENT = "RECV_B"


class Action(NamedTuple):
    """One action on one microbatch of one stage.

    A send belongs to the stage that sends, a receive to the stage that receives. ``RECEIVE_*`` only posts the
    receive; the compute action that needs the value waits for it.
    """

    stage: int
    kind: ActionKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


# For each rank, what it does in order.
Schedule = list[list[Action]]

"""From compute actions to the full list: the sends and receives follow from who needs whose values.

A receive is posted ``posted_ahead`` compute actions before the one that needs it, so that a transfer runs while
its receiver still computes; a send follows at once after the compute action that makes the value. Rank 1 of 3,
one ahead::

    compute   1F0                     1F1                      1B0 ...
    lowered   RECV 1F0, RECV 1F1, 1F0, SEND 1F0, RECV 1B0, 1F1, SEND 1F1, RECV 1F2, 1B0, SEND 1B0 ...
"""

from collections.abc import Collection

from nxdpp.schedules.actions import Action, ActionKind, Schedule

# (maker, user): a value that stage ``maker`` makes is an input of stage ``user``.
StageEdge = tuple[int, int]


def lower(schedule: Schedule, edges: Collection[StageEdge], posted_ahead: int = 2) -> Schedule:
    """Add the sends and receives to each rank's compute actions.

    Args:
        schedule: compute actions of each rank.
        edges: which stage's values are inputs of which; gradients go the other way.
        posted_ahead: how many compute actions before its use a receive is posted; bounds the buffers held.
    """
    return [_lower_rank(actions, edges, posted_ahead) for actions in schedule]


def _lower_rank(actions: list[Action], edges: Collection[StageEdge], posted_ahead: int) -> list[Action]:
    makers = {maker for maker, _ in edges}
    users = {user for _, user in edges}
    receives = [_receive(action, makers, users) for action in actions]
    lowered = [receive for receive in receives[:posted_ahead] if receive]
    for position, action in enumerate(actions):
        upcoming = position + posted_ahead
        if upcoming < len(actions) and (receive := receives[upcoming]):
            lowered.append(receive)
        lowered.append(action)
        if send := _send(action, makers, users):
            lowered.append(send)
    return lowered


def _receive(action: Action, makers: set[int], users: set[int]) -> Action | None:
    if action.kind is ActionKind.FORWARD and action.stage in users:
        return action._replace(kind=ActionKind.RECEIVE_ACTIVATION)
    if action.kind is ActionKind.BACKWARD and action.stage in makers:
        return action._replace(kind=ActionKind.RECEIVE_GRADIENT)
    return None


def _send(action: Action, makers: set[int], users: set[int]) -> Action | None:
    if action.kind is ActionKind.FORWARD and action.stage in makers:
        return action._replace(kind=ActionKind.SEND_ACTIVATION)
    if action.kind is ActionKind.BACKWARD and action.stage in users:
        return action._replace(kind=ActionKind.SEND_GRADIENT)
    return None

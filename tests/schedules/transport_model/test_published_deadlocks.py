"""Deadlocks that others have published: the model and the replay of logs find each, and none in a form that is mended.

- pytorch #172668: both ranks wait for a send before they post the receive of the other's.
- Megatron-LM #5240: the first message of two ranks makes their communicator, which stops both hosts.
- pytorch #196666: messages with different ranks stand in one queue, and one that waits stops those behind it.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from nxdpp.schedules.actions import Action, ActionKind, Schedule
from nxdpp.schedules.check import ScheduleError
from nxdpp.schedules.lowering.lowering import Exchanges, lower
from nxdpp.schedules.lowering.transport_rules import NCCL
from nxdpp.schedules.written import parse_schedule
from tests.schedules.transport_model.boundaries import chain
from tests.schedules.transport_model.model import Model, Programs
from tests.schedules.transport_model.situation import Backend, Situation, Synchronises
from tests.schedules.transport_model.verdict import find_deadlock, programs
from tests.support.fake_device import deadlock

WAITS_FOR_EACH = Situation(synchronises=Synchronises.ALWAYS)
ONE_QUEUE = Situation(one_queue=True)


class Published(NamedTuple):
    """Actions of all ranks that deadlock in ``situation``, and others that do not."""

    rows: list[str]
    mended: list[str]
    situation: Situation


PUBLISHED = {
    "pytorch 172668": Published(
        ["0SEND_F1@1 2RECV_F0@1 2F0", "1SEND_F0@2 1RECV_F1@0 1F1"],
        ["2RECV_F0@1 0SEND_F1@1 2F0", "1SEND_F0@2 1RECV_F1@0 1F1"],
        WAITS_FOR_EACH,
    ),
    # Four ranks of two stages. In the mended form odd ranks receive first.
    "Megatron-LM 5240": Published(
        ["0SEND_F3@1 4RECV_F0@3", "1SEND_F2@2 1RECV_F3@0", "2SEND_F1@3 2RECV_F2@1", "3SEND_F0@4 3RECV_F1@2"],
        ["0SEND_F3@1 4RECV_F0@3", "1RECV_F3@0 1SEND_F2@2", "2SEND_F1@3 2RECV_F2@1", "3RECV_F1@2 3SEND_F0@4"],
        Situation(first_step=True),
    ),
}


def _parsed(rows: list[str]) -> Schedule:
    actions = re.compile(r"(\d+)([A-Z_]+)(\d+)(?:@(\d+))?")
    return [
        [Action(int(stage), ActionKind(kind), int(mb), int(peer) if peer else None) for stage, kind, mb, peer in found]
        for found in map(actions.findall, rows)
    ]


def _edges(lowered: Schedule) -> frozenset[tuple[int, int]]:
    return chain(1 + max(action.stage for row in lowered for action in row))


def _check_model(lowered: Schedule, situation: Situation) -> None:
    """Check in one group over all ranks."""
    rules = NCCL._replace(pair_groups=False)
    Model(Programs(lowered, Exchanges(lowered, _edges(lowered)), rules, None), Backend.NCCL_LAZY, situation).check()


def _replayed(lowered: Schedule, situation: Situation) -> list[deadlock.Stuck]:
    """Replay what the ranks would log on the fake accelerator."""
    return deadlock.replay({rank: list(_log(rank, lowered, situation)) for rank in range(len(lowered))})


def _log(rank: int, lowered: Schedule, situation: Situation) -> Iterator[deadlock.Line]:
    exchanges = Exchanges(lowered, _edges(lowered))
    connected = set()
    for action in lowered[rank]:
        for each in exchanges.each(action) if "_" in action.kind.value else ():
            assert each.peer is not None, "each has a peer"
            peer = exchanges.rank_of[each.peer]
            pair = {"communicator": f"{min(rank, peer)}:{max(rank, peer)}", "ranks": sorted((rank, peer)), "number": 0}
            if situation.first_step and peer not in connected:
                connected.add(peer)
                yield {"kind": "connect", **pair}
            kind = "send" if "SEND" in each.kind.value else "recv"
            yield {"kind": "operation", **pair, "parts": [{"kind": kind, "peer": peer}]}
            if situation.synchronises is Synchronises.ALWAYS:
                yield {"kind": "wait"}


def _assert_circle(message: str, ranks: int) -> None:
    waits = [wait.split(" waits for ") for wait in message.removeprefix("deadlock: ").removesuffix(".").split("; ")]
    assert [there for _, there in waits] == [here for here, _ in waits[1:] + waits[:1]]
    assert {f"rank {rank} " for rank in range(ranks)} <= set(re.findall(r"rank \d+ ", message)), message


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_deadlock_is_found_and_its_mended_form_ends(name: str) -> None:
    rows, mended = _parsed(PUBLISHED[name].rows), _parsed(PUBLISHED[name].mended)
    for situation in (PUBLISHED[name].situation, ONE_QUEUE):
        with pytest.raises(ScheduleError, match="deadlock: ") as caught:
            _check_model(rows, situation)
        _assert_circle(str(caught.value), len(rows))
        circle = [(each.rank, each.waits_for) for each in _replayed(rows, situation)]
        assert circle == [(rank, ((rank + 1) % len(rows),)) for rank in range(len(rows))]

        _check_model(mended, situation)
        assert _replayed(mended, situation) == []
    # The order alone is no deadlock: it needs these waits.
    _check_model(rows, Situation())


# Of pytorch #196666: rank 0 sends four microbatches before it receives the first for its second stage.
LOOPED = [
    "0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3",
    "1F0 1F1 1F2 1F3",
    "2F0 2F1 2F2 2F3",
    "3F0 3F1 3F2 3F3",
]


def test_a_shared_queue_is_found_and_a_group_for_each_pair_and_way_ends() -> None:
    schedule = parse_schedule([row.split() for row in LOOPED])
    at_use = NCCL._replace(posted_ahead=0)
    lowered = lower(schedule, chain(5), posted_ahead=0)

    with pytest.raises(ScheduleError, match="deadlock: ") as caught:
        _check_model(lowered, ONE_QUEUE)
    _assert_circle(str(caught.value), 4)
    assert {each.rank for each in _replayed(lowered, ONE_QUEUE)} == {0, 1, 2, 3}

    Model(programs(schedule, chain(5), at_use, trains=False), Backend.NCCL_EAGER, Situation()).check()
    # These groups share the queue of a device that has one. The global order does without a second one.
    with pytest.raises(ScheduleError, match="deadlock: "):
        Model(programs(schedule, chain(5), at_use, trains=False), Backend.NCCL_EAGER, ONE_QUEUE).check()
    assert find_deadlock(programs(schedule, chain(5), NCCL, trains=False)) is None
    assert _replayed(lower(schedule, chain(5), None), ONE_QUEUE) == []

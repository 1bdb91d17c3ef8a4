"""Deadlocks of receives that are posted ahead on NCCL, in groups over the whole pipeline.

A simulation before this model found them; ``TransportRules`` of NCCL excludes them.
"""

from typing import NamedTuple

import pytest

from nxdpp.schedules.check import ScheduleError
from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.lowering.transport_rules import TransportRules
from tests.schedules.transport_model.boundaries import chain
from tests.schedules.transport_model.model import Model
from tests.schedules.transport_model.situation import Backend, Situation, Synchronises
from tests.schedules.transport_model.verdict import find_deadlock, programs

# Two compute actions ahead, as on gloo; a group for each kind of transfer, over all ranks.
POSTED_AHEAD = TransportRules("nccl", posted_ahead=2, pair_groups=False, has_tags=False)
RANKS = (2, 3, 4, 8)


class Finding(NamedTuple):
    """A situation, and for each family the least number of ranks with a deadlock, or the only one."""

    backend: Backend
    situation: Situation
    least: dict[str, int]
    only: dict[str, int]


FINDINGS = {
    "lazy communicators, forwards that ask the device": Finding(
        Backend.NCCL_LAZY,
        Situation(first_step=True, asks=True),
        {"gpipe": 2, "looped-bfs": 2, "1f1b": 3, "zb-h1": 3, "zb1p": 3, "v-half": 3, "v-min": 3},
        {},
    ),
    "eager communicators": Finding(
        Backend.NCCL_EAGER,
        Situation(),
        {"1f1b": 4, "interleaved": 4, "dualpipe-v": 4, "zb1p": 4, "looped-bfs": 8, "zb-h1": 8, "zb-v": 8},
        {},
    ),
    "device-wide synchronisation": Finding(
        Backend.NCCL_LAZY,
        Situation(synchronises=Synchronises.FIRST_MICROBATCH),
        {"1f1b": 2, "zb-h1": 2, "zb1p": 2, "v-half": 2, "v-min": 2, "zb-v": 3, "dualpipe-v": 3},
        {"interleaved": 2},
    ),
    "one hardware queue": Finding(Backend.NCCL_EAGER, Situation(one_queue=True), dict.fromkeys(FAMILIES, 2), {}),
}


def _has_deadlock(name: str, ranks: int, finding: Finding) -> bool:
    family = FAMILIES[name]
    edges = chain(family.placement(ranks).stages)
    model = Model(programs(family.build(ranks, 4 * ranks), edges, POSTED_AHEAD), finding.backend, finding.situation)
    try:
        model.check()
    except ScheduleError as error:
        return str(error).startswith("deadlock: ")
    return False


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("finding", FINDINGS.values(), ids=FINDINGS)
def test_receives_posted_ahead_on_nccl_deadlock(finding: Finding, name: str) -> None:
    """The number of microbatches is 4 p."""
    least = finding.least.get(name, max(RANKS) + 1)
    expected = [ranks for ranks in RANKS if ranks >= least or ranks == finding.only.get(name)]

    assert [ranks for ranks in RANKS if _has_deadlock(name, ranks, finding)] == expected


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.default_chunks == 1])
def test_groups_of_two_exclude_the_first_two_findings(name: str) -> None:
    """Device-wide synchronisation needs the global order too.

    With several chunks a group has activations and gradients. Only the global order is the same at both of its ends.
    """
    pairs = POSTED_AHEAD._replace(pair_groups=True)
    for ranks in RANKS:
        family = FAMILIES[name]
        actions = programs(family.build(ranks, 4 * ranks), chain(family.placement(ranks).stages), pairs)
        for backend in (Backend.NCCL_LAZY, Backend.NCCL_EAGER):
            for first_step in (True, False):
                Model(actions, backend, Situation(first_step, asks=True)).check()
    with pytest.raises(ScheduleError, match="deadlock: "):
        Model(actions, Backend.NCCL_EAGER, Situation(synchronises=Synchronises.ALWAYS)).check()


def test_a_deadlock_is_told_with_its_circle() -> None:
    deadlock = find_deadlock(programs(FAMILIES["1f1b"].build(4, 16), chain(4), POSTED_AHEAD))

    assert deadlock is not None
    assert str(deadlock).startswith(
        "nccl, lazy communicators, first step, all ranks synchronise in the first microbatch: "
    )
    waits = deadlock.message.removeprefix("deadlock: ").removesuffix(".").split("; ")
    pairs = [wait.split(" waits for ") for wait in waits]
    assert [there for _, there in pairs] == [here for here, _ in pairs[1:] + pairs[:1]], "a circle"
    assert ("rank 1 (makes a communicator for 1RECV_B0)", "the making of a communicator of ranks 1 and 2") in map(
        tuple, pairs
    )

"""Exchanges of replicas for each stage of ZeRO, against formulas."""

from dataclasses import replace

import pytest

from nxdpp.devices.collective_bytes import least_sent
from nxdpp.planning.layout import Layout
from nxdpp.planning.machine import DEVICES, Link, Machine
from nxdpp.planning.replica_collectives import ReplicaCollectives
from nxdpp.planning.stage_costs import Itemsizes, RankState
from nxdpp.schedules.actions import ActionKind
from nxdpp.schedules.execution import ExchangeTimes

# 1 byte a second and no latency: seconds are sent bytes.
MACHINE = Machine(2, 10**9, DEVICES["h100"], link=Link(1.0, 0.0))
CORES = replace(MACHINE, device=DEVICES["cpu"])
HALF = Itemsizes(2, 4)
STATE = RankState(100, 200, 200, 400, 1200, unit=50)


def _exchanges(zero: int, machine: Machine = MACHINE) -> ReplicaCollectives:
    return ReplicaCollectives(machine, Layout(data=2, zero=zero), HALF)


def test_parameters_move_in_their_dtype_and_gradients_in_that_of_the_reduction() -> None:
    each = _exchanges(2)

    assert each.gather(200) == least_sent("all_gather", 200, 2) == 100
    assert each.scatter(200) == least_sent("reduce_scatter", 400, 2) == 200


@pytest.mark.parametrize(("zero", "sent"), [(0, 400), (1, 300), (2, 300), (3, 3 * 400)])
def test_sent_bytes_of_a_step(zero: int, sent: float) -> None:
    """ZeRO-2 sends each byte once, ZeRO-3 gathers twice and reduces for each of 3 microbatches."""
    assert _exchanges(zero).sent(STATE, 3, 0.0) == sent
    # A weight-gradient gathers once more.
    assert _exchanges(zero).sent(STATE, 3, 1.0) == sent + (300 if zero == 3 else 0)


def test_two_units_are_gathered_ahead() -> None:
    """A stage of 200 bytes takes 100 seconds, and each of its four units 25."""
    embedding = replace(STATE, rest=50, unit=30)
    (first, second) = _exchanges(2).of_stages([STATE, embedding])[ActionKind.GATHER]

    assert first == ExchangeTimes(100, head=25, ahead=50)
    # The embedding is the first unit, and a layer the second one: 80 of 200 bytes, which the forward waits for.
    assert second == ExchangeTimes(100, head=40, ahead=40)
    # On a CPU the rank gathers them itself.
    assert _exchanges(2, CORES).of_stages([STATE])[ActionKind.GATHER] == [ExchangeTimes(100, head=50, ahead=50)]


def test_the_last_bucket_of_a_reduction_is_ready_at_the_end() -> None:
    assert _exchanges(2).of_stages([STATE])[ActionKind.REDUCE] == [ExchangeTimes(200, tail=200)]
    # An all-reduce sends twice as much.
    assert _exchanges(0).of_stages([STATE])[ActionKind.AVERAGE] == [ExchangeTimes(400, tail=400)]
    assert _exchanges(3).of_stages([STATE]) == {
        ActionKind.GATHER: [ExchangeTimes(100)],
        ActionKind.RESHARD: [ExchangeTimes(200)],
    }


def test_the_least_time_of_a_schedule() -> None:
    assert _exchanges(3).least_in_schedule(200, 200, 3, 500.0) == 3 * 400
    assert _exchanges(3).least_in_schedule(200, 200, 3, 5000.0) == 5000
    assert _exchanges(3, CORES).least_in_schedule(200, 200, 3, 5000.0) == 5000 + 3 * 400
    assert _exchanges(2).least_in_schedule(200, 200, 3, 5.0) == 5
    assert _exchanges(1).after_schedule(200) == 100 + 200
    assert _exchanges(2).after_schedule(200) == 0

"""Times of the exchanges of replicas for each stage of ZeRO, against formulas."""

from dataclasses import replace

import pytest

from nxdpp.devices.collective_bytes import least_sent
from nxdpp.planning.exchange_times import ExchangeTimes
from nxdpp.planning.layout import Layout
from nxdpp.planning.machine import DEVICES, Link, Machine
from nxdpp.planning.stage_costs import Itemsizes, RankState

# 1 byte a second and no latency: seconds are sent bytes.
MACHINE = Machine(2, 10**9, DEVICES["h100"], link=Link(1.0, 0.0))
CORES = replace(MACHINE, device=DEVICES["cpu"])
HALF = Itemsizes(2, 4)
STATE = RankState(100, 200, 200, 400, 1200, unit=50)


def _exchanges(zero: int, machine: Machine = MACHINE) -> ExchangeTimes:
    return ExchangeTimes(machine, Layout(data=2, zero=zero), HALF)


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


def test_gathers_hide_under_the_first_forward_of_their_stage() -> None:
    """A stage of 200 bytes takes 100 seconds, and each of its four units 25."""
    states = [STATE, STATE]
    late = _exchanges(2).gather_delay

    assert late([{0: (0.0, 1000.0), 1: (1000.0, 2000.0)}], states) == 25
    # The first stage is whole 70 seconds after the end of its first forward, the second one 150.
    assert late([{0: (0.0, 30.0), 1: (30.0, 50.0)}], states) == 150
    # Two units of a later stage have run before: the others take 50 seconds of a forward of 10.
    assert late([{0: (500.0, 510.0)}], states) == 40
    assert late([{0: (0.0, 1000.0)}, {1: (1000.0, 1010.0)}], states) == 25 + 40
    # The embedding is the first unit, and a layer the second one: 100 of 200 bytes again.
    assert late([{0: (500.0, 510.0)}], [replace(STATE, rest=50, unit=30)]) == 50
    assert _exchanges(2, CORES).gather_delay([{0: (500.0, 510.0), 1: (510.0, 520.0)}], states) == 200
    for zero in (0, 1, 3):
        assert _exchanges(zero).gather_delay([{0: (0.0, 30.0)}], states) == 0


def test_reductions_hide_under_the_last_backwards() -> None:
    lasts, bytes_ = {0: (100.0, 150.0), 1: (0.0, 50.0)}, {0: 200.0, 1: 200.0}

    # Stage 1 is one bucket, which is ready at 50 and takes 200 seconds. Stage 0 follows it.
    assert _exchanges(2).reduced_end(lasts, bytes_, 150.0) == 50 + 2 * 200
    # An all-reduce sends twice as much.
    assert _exchanges(0).reduced_end(lasts, bytes_, 150.0) == 50 + 2 * 400
    assert _exchanges(2, CORES).reduced_end(lasts, bytes_, 150.0) == 150 + 400
    assert _exchanges(3).reduced_end(lasts, bytes_, 150.0) == 150


def test_the_least_time_of_a_schedule() -> None:
    assert _exchanges(3).least_in_schedule(200, 200, 3, 500.0) == 3 * 400
    assert _exchanges(3).least_in_schedule(200, 200, 3, 5000.0) == 5000
    assert _exchanges(3, CORES).least_in_schedule(200, 200, 3, 5000.0) == 5000 + 3 * 400
    assert _exchanges(2).least_in_schedule(200, 200, 3, 5.0) == 5
    assert _exchanges(1).after_schedule(200) == 100 + 200
    assert _exchanges(2).after_schedule(200) == 0

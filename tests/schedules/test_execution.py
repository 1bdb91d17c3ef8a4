"""Exchanges in simulated time: what computations hide of them, by hand and against a list with all actions."""

import pytest

from nxdpp.schedules.actions import ActionKind, Schedule, parse_action
from nxdpp.schedules.execution import ExchangeTimes, Execution, Times, run_in_order
from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.lowering.additions import AVERAGE, OF_ZERO, SHARDS_ONCE_A_STEP, Additions, add

# Four units, of which two are gathered ahead; a reduction in one bucket.
GATHER = ExchangeTimes(100, head=25, ahead=50)
REDUCE = ExchangeTimes(200, tail=200)


def _run(text: str, lengths: list[float], additions: Additions, hides: bool = True) -> Execution:
    schedule = [add([parse_action(each) for each in text.split()], additions)]
    exchanges = {kind: [REDUCE] * 2 for kind in (ActionKind.REDUCE, ActionKind.AVERAGE)}
    zeros = [0.0] * 2
    return run_in_order(
        schedule,
        2,
        1,
        Times(lengths, lengths, zeros, zeros, exchanges | {ActionKind.GATHER: [GATHER] * 2}, hides),
    )


@pytest.mark.parametrize(("lengths", "end"), [([1000.0, 1000.0], 2025), ([30.0, 20.0], 200)])
def test_gathers_hide_under_the_first_forward_of_their_stage(lengths: list[float], end: float) -> None:
    """The first forward waits for the first unit. The second stage is gathered ahead, or waits for two whole stages."""
    run = _run("0F0 1F0", lengths, SHARDS_ONCE_A_STEP[:1])

    assert run.clocks == [end]
    assert run.exposed == [end - sum(lengths)]


@pytest.mark.parametrize("additions", [AVERAGE, SHARDS_ONCE_A_STEP[1:]])
def test_reductions_hide_under_the_last_backwards(additions: Additions) -> None:
    """Stage 1 is one bucket, which is ready at 150 and takes 200. Stage 0 follows it."""
    run = _run("0F0 1F0 1B0 0B0", [50.0, 50.0], additions)

    assert (run.clocks, run.exposed, run.links) == ([200], [0], [150 + 2 * 200])
    assert run.ends[0][-1] == 150 + 2 * 200


def test_nothing_hides_an_exchange_on_a_cpu() -> None:
    run = _run("0F0 1F0 1B0 0B0", [50.0, 50.0], SHARDS_ONCE_A_STEP, hides=False)

    assert run.clocks == [200 + 2 * 200 + (25 + 50) * 2]


@pytest.mark.parametrize("hides", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_exchanges_around_each_action_are_part_of_it(name: str, hides: bool) -> None:
    schedule = FAMILIES[name].build(3, 5)
    stages = 1 + max(action.stage for actions in schedule for action in actions)
    lengths = [[1.0 + (stage * 7 + part) % 3 for stage in range(stages)] for part in range(4)]
    exchanges = {
        ActionKind.GATHER: [ExchangeTimes(1.5 + stage % 2) for stage in range(stages)],
        ActionKind.RESHARD: [ExchangeTimes(0.5 + stage % 3) for stage in range(stages)],
    }
    times = Times(lengths[0], lengths[1], lengths[2], lengths[3], exchanges, hides)

    with_actions: Schedule = [add(actions, OF_ZERO[3]) for actions in schedule]
    one_by_one = run_in_order(with_actions, stages, 5, times)
    together = run_in_order(schedule, stages, 5, times.around_each())

    assert together.clocks == pytest.approx(one_by_one.clocks)
    computes = [
        [start for start, action in zip(starts, actions, strict=True) if action.kind.value in "FBIW"]
        for starts, actions in zip(one_by_one.starts, with_actions, strict=True)
    ]
    assert [pytest.approx(starts) for starts in together.starts] == computes

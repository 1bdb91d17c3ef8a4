"""Exchanges in simulated time: what computations hide of them, by hand and against a list with all actions."""

import pytest

from nxdpp.schedules.actions import ActionKind, parse_action
from nxdpp.schedules.execution import ExchangeTimes, Execution, Times, run_in_order
from nxdpp.schedules.lowering.additions import AVERAGE, SHARDS_ONCE_A_STEP, TOKENS, Additions, add

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


def test_a_pair_is_shorter_by_the_exchanges_of_tokens_that_it_hides() -> None:
    """The forward of stage 0 and the backward of stage 1 exchange once each, 5 long, while the other one computes."""
    actions = [parse_action(each) for each in ["0F0", "1F0", "0F1", "1B0", "1F1", "1B1", "0B0", "0B1"]]
    whole = [(25.0, 0.0)]
    forward, backward = [[(10.0, 5.0), (10.0, 0.0)], whole], [whole, [(20.0, 5.0), (5.0, 0.0)]]
    times = Times([25.0, 25.0], [25.0, 30.0], [0.0, 0.0], [0.0, 0.0], tokens=(forward, backward))

    alone, paired = (run_in_order([add(actions, additions)], 2, 2, times) for additions in ((), TOKENS))

    assert (alone.hidden, paired.hidden) == ([0.0], [10.0])
    assert alone.clocks[0] - paired.clocks[0] == 10.0

"""1F1B as data: complete, in order, and with no more microbatches live than the stages behind need."""

from hypothesis import given
from hypothesis import strategies as st

from nxdpp.schedules.actions import ActionKind
from nxdpp.schedules.families.one_forward_one_backward import ONE_FORWARD_ONE_BACKWARD

SIZES = {"stages": st.integers(1, 8), "microbatches": st.integers(1, 16)}


@given(**SIZES)
def test_each_forward_and_backward_is_there_once_on_its_own_rank(stages: int, microbatches: int) -> None:
    schedule = ONE_FORWARD_ONE_BACKWARD.build(stages, microbatches)

    assert len(schedule) == stages
    for stage, actions in enumerate(schedule):
        assert {action.stage for action in actions} == {stage}
        assert len(actions) == 2 * microbatches
        assert {(action.kind, action.microbatch) for action in actions} == {
            (kind, microbatch)
            for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)
            for microbatch in range(microbatches)
        }


@given(**SIZES)
def test_each_forward_comes_before_its_backward(stages: int, microbatches: int) -> None:
    for actions in ONE_FORWARD_ONE_BACKWARD.build(stages, microbatches):
        seen = set()
        for action in actions:
            if action.kind is ActionKind.FORWARD:
                seen.add(action.microbatch)
            else:
                assert action.microbatch in seen


@given(**SIZES)
def test_gradients_are_accumulated_in_the_order_of_the_microbatches(stages: int, microbatches: int) -> None:
    """The order in which one process adds them up, so that sums are the same to the last bit."""
    for actions in ONE_FORWARD_ONE_BACKWARD.build(stages, microbatches):
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
            assert [a.microbatch for a in actions if a.kind is kind] == list(range(microbatches))


@given(**SIZES)
def test_stage_s_of_p_holds_at_most_p_minus_s_microbatches(stages: int, microbatches: int) -> None:
    for stage, actions in enumerate(ONE_FORWARD_ONE_BACKWARD.build(stages, microbatches)):
        live = peak = 0
        for action in actions:
            live += 1 if action.kind is ActionKind.FORWARD else -1
            peak = max(peak, live)
        assert peak == min(stages - stage, microbatches)
        assert live == 0


def test_the_drawing_in_the_module() -> None:
    drawn = [" ".join(map(str, actions[:8])) for actions in ONE_FORWARD_ONE_BACKWARD.build(4, 8)]

    assert drawn == [
        "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5",
        "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2",
        "2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4",
        "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3",
    ]

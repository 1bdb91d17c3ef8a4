"""Sends and receives of a lowered schedule."""

from collections import Counter, defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from nxdpp.schedules.actions import Action, ActionKind
from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.lowering.lowering import lower, matching_receive
from tests.schedules.pipelines import Pipeline, chain, pipelines

_BACKWARDS = (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)
COMPUTE = (ActionKind.FORWARD, *_BACKWARDS, ActionKind.WEIGHT_GRADIENT)
NEEDED_BY = {ActionKind.RECEIVE_ACTIVATION: (ActionKind.FORWARD,), ActionKind.RECEIVE_GRADIENT: _BACKWARDS}
MADE_BY = {ActionKind.SEND_ACTIVATION: (ActionKind.FORWARD,), ActionKind.SEND_GRADIENT: _BACKWARDS}

AHEAD = st.integers(0, 4)


def _each(action: Action, pipeline: Pipeline) -> list[Action]:
    """Replace a send or receive without a peer by one for each peer on another rank."""
    if action.peer is not None:
        return [action]
    to_destinations = action.kind in (ActionKind.SEND_ACTIVATION, ActionKind.RECEIVE_GRADIENT)
    return [action._replace(peer=peer) for peer in _peers(action.stage, to_destinations, pipeline)]


def _peers(stage: int, to_destinations: bool, pipeline: Pipeline) -> list[int]:
    rank_of = pipeline.placement.rank_of
    peers = [
        (destination if to_destinations else source)
        for source, destination in pipeline.edges
        if stage == (source if to_destinations else destination)
    ]
    return sorted(peer for peer in peers if rank_of(peer) != rank_of(stage))


@given(pipelines(), AHEAD)
@settings(deadline=None, max_examples=60)
def test_compute_actions_are_unchanged(pipeline: Pipeline, ahead: int) -> None:
    lowered = lower(pipeline.schedule, pipeline.edges, ahead)

    assert [[action for action in actions if action.kind in COMPUTE] for actions in lowered] == pipeline.schedule


@given(pipelines(), AHEAD)
@settings(deadline=None, max_examples=60)
def test_sends_and_receives_are_those_of_the_edges(pipeline: Pipeline, ahead: int) -> None:
    """No transfer between stages on one rank; one gradient for each activation in training."""
    remote = [
        (source, destination)
        for source, destination in pipeline.edges
        if pipeline.placement.rank_of(source) != pipeline.placement.rank_of(destination)
    ]
    expected = Counter(
        action
        for source, destination in remote
        for microbatch in range(pipeline.microbatches)
        for action in (
            Action(source, ActionKind.SEND_ACTIVATION, microbatch, destination),
            Action(destination, ActionKind.RECEIVE_ACTIVATION, microbatch, source),
            *(
                (
                    Action(destination, ActionKind.SEND_GRADIENT, microbatch, source),
                    Action(source, ActionKind.RECEIVE_GRADIENT, microbatch, destination),
                )
                if pipeline.trains
                else ()
            ),
        )
    )

    lowered = lower(pipeline.schedule, pipeline.edges, ahead)

    moves = [action for actions in lowered for action in actions if action.kind not in COMPUTE]
    assert Counter(each for move in moves for each in _each(move, pipeline)) == expected


@given(pipelines(), AHEAD)
@settings(deadline=None, max_examples=60)
def test_receives_between_two_ranks_are_in_the_order_of_the_sends(pipeline: Pipeline, ahead: int) -> None:
    rank_of = pipeline.placement.rank_of
    sent, received = defaultdict(list), defaultdict(list)

    for rank, actions in enumerate(lower(pipeline.schedule, pipeline.edges, ahead)):
        for action in actions:
            for each in _each(action, pipeline) if action.kind not in COMPUTE else ():
                assert each.peer is not None
                if each.kind in MADE_BY:
                    receive = matching_receive(each)
                    sent[rank, rank_of(each.peer), receive.kind].append(receive)
                else:
                    received[rank_of(each.peer), rank, each.kind].append(each)

    assert sent == received


@given(pipelines(), AHEAD)
@settings(deadline=None, max_examples=60)
def test_a_receive_is_posted_in_time_and_a_send_at_once(pipeline: Pipeline, ahead: int) -> None:
    for actions in lower(pipeline.schedule, pipeline.edges, ahead):
        computed: Action | None = None
        posted: set[Action] = set()
        for action in actions:
            if action.kind in NEEDED_BY:
                posted |= set(_each(action, pipeline))
            elif action.kind in MADE_BY:
                assert computed is not None
                assert (computed.stage, computed.microbatch) == (action.stage, action.microbatch)
                assert computed.kind in MADE_BY[action.kind]
            else:
                computed = action
                for kind, destinations in ((ActionKind.RECEIVE_ACTIVATION, False), (ActionKind.RECEIVE_GRADIENT, True)):
                    if action.kind in NEEDED_BY[kind]:
                        for peer in _peers(action.stage, destinations, pipeline):
                            assert Action(action.stage, kind, action.microbatch, peer) in posted


def test_the_example_in_the_module() -> None:
    actions = lower(FAMILIES["1f1b"].build(3, 4), chain(3), posted_ahead=1)[1]

    assert list(map(str, actions[:10])) == [
        "1RECV_F0",
        "1RECV_F1",
        "1F0",
        "1SEND_F0",
        "1RECV_B0",
        "1F1",
        "1SEND_F1",
        "1RECV_F2",
        "1B0",
        "1SEND_B0",
    ]

"""Sends and receives of a lowered schedule."""

from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxdpp.schedules.actions import Action, ActionKind
from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.lowering.lowering import lower, lower_rank, matching_receive
from nxdpp.schedules.placement import Placement
from nxdpp.schedules.written import parse_schedule
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
@settings(deadline=None)
def test_compute_actions_are_unchanged(pipeline: Pipeline, ahead: int) -> None:
    lowered = lower(pipeline.schedule, pipeline.edges, ahead)

    assert [[action for action in actions if action.kind in COMPUTE] for actions in lowered] == pipeline.schedule


@given(pipelines(), AHEAD)
@settings(deadline=None)
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
@settings(deadline=None)
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
@settings(deadline=None)
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


@given(pipelines(names=("gpipe", "1f1b", "1f1b-eager", "zb-h1")), AHEAD)
@settings(deadline=None)
def test_receives_of_one_stage_a_rank_are_in_time_and_without_peer(pipeline: Pipeline, ahead: int) -> None:
    for actions in lower(pipeline.schedule, pipeline.edges, ahead):
        for position, action in enumerate(actions):
            assert action.peer is None
            if action.kind in NEEDED_BY:
                uses = {action._replace(kind=kind) for kind in NEEDED_BY[action.kind]}
                use = next(at for at in range(position, len(actions)) if actions[at] in uses)
                assert sum(a.kind in COMPUTE for a in actions[position:use]) <= ahead


@given(pipelines(), AHEAD, st.data())
@settings(deadline=None, max_examples=50)
def test_a_rank_needs_its_own_edges_only(pipeline: Pipeline, ahead: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, pipeline.placement.ranks - 1))
    own = {edge for edge in pipeline.edges if rank in map(pipeline.placement.rank_of, edge)}
    # Stages without edges are in the schedule too.
    alone = lower_rank(pipeline.schedule, rank, own, ahead)

    assert alone == lower(pipeline.schedule, pipeline.edges, ahead)[rank]


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


def test_two_stages_on_one_rank_and_a_tensor_that_skips_two() -> None:
    """The tensor from stage 0 to stage 3 is sent and its receive posted before the one from stage 2."""
    schedule = parse_schedule([["0F0", "0F1", "2F0", "2F1"], ["1F0", "1F1", "3F0", "3F1"]])

    lowered = lower(schedule, chain(4) | {(0, 3)}, posted_ahead=0)

    assert " ".join(map(str, lowered[0])) == (
        "0F0 0SEND_F0@1 0SEND_F0@3 0F1 0SEND_F1@1 0SEND_F1@3 2RECV_F0@1 2F0 2SEND_F0@3 2RECV_F1@1 2F1 2SEND_F1@3"
    )
    assert " ".join(map(str, lowered[1])) == (
        "1RECV_F0@0 1F0 1SEND_F0@2 3RECV_F0@0 1RECV_F1@0 1F1 1SEND_F1@2 3RECV_F1@0 3RECV_F0@2 3F0 3RECV_F1@2 3F1"
    )


def test_gradients_leave_after_the_input_gradient() -> None:
    schedule = parse_schedule([["0F0", "0I0", "0W0"], ["1F0", "1I0", "1W0"]])

    assert " ".join(map(str, lower(schedule, chain(2))[1])) == "1RECV_F0 1F0 1I0 1SEND_B0 1W0"


def test_stages_on_one_rank_of_a_v_exchange_nothing() -> None:
    placement = Placement(2, 2, v_shaped=True)
    assert placement.rank_of(1) == placement.rank_of(2)

    lowered = lower(FAMILIES["zb-v"].build(2, 3), chain(4))

    assert not {"1SEND_F0@2", "2RECV_F0@1", "2SEND_B0@1", "1RECV_B0@2"} & set(map(str, lowered[1]))


@pytest.mark.parametrize("first", ["1F0", "1F1"])
def test_microbatches_in_another_order_than_they_are_sent(first: str) -> None:
    """Two source stages send in different orders: one action cannot post the receives of both."""
    other = {"1F0": "1F1", "1F1": "1F0"}[first]
    schedule = parse_schedule([["0F0", "0F1"], [first, other], ["2F0", "2F1"]])

    last = lower(schedule, {(0, 2), (1, 2)}, posted_ahead=0)[2]

    activations = [str(action) for action in last if action.kind is ActionKind.RECEIVE_ACTIVATION]
    assert activations == (
        ["2RECV_F0", "2RECV_F1"] if first == "1F0" else ["2RECV_F0@0", "2RECV_F1@1", "2RECV_F0@1", "2RECV_F1@0"]
    )


def test_stages_without_edges_send_nothing() -> None:
    assert lower(FAMILIES["zb-v"].build(2, 2), ()) == FAMILIES["zb-v"].build(2, 2)

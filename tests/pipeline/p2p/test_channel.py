"""Channels: numbering of tensors and tags, order of receives, limit of sends in flight."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest
import torch

from nxdpp.pipeline.p2p.channel import Peer, RemoteChannel
from nxdpp.pipeline.p2p.layout import Boundary, ValueLayout, layout_of
from nxdpp.pipeline.p2p.transport import Direction, Transport
from nxdpp.ranks.faults.waits import Wait

HIDDEN = torch.randn(2, 3, 4, requires_grad=True)
MASK = torch.ones(2, 3)
LAYOUTS = {"hidden": layout_of(HIDDEN), "mask": layout_of(MASK)}
PAIRS, MICROBATCHES = 4, 8


class NotedTransport:
    """Notes what channels ask of it; every receive returns ``HIDDEN``."""

    is_in_host_memory = False

    def __init__(self) -> None:
        self.received: list[tuple[Direction, int]] = []
        self.waited: list[int] = []
        self.sent: list[torch.Tensor] = []

    def post_receive(self, layout: Any, source: int, direction: Direction, tag: int) -> Callable[[], torch.Tensor]:
        self.received.append((direction, tag))
        return lambda: HIDDEN

    def send(self, tensor: torch.Tensor, destination: int, direction: Direction, tag: int) -> tuple[Any, torch.Tensor]:
        transport = self

        class Sent:
            def wait(self) -> None:
                transport.waited.append(tag)

        self.sent.append(tensor)
        return Sent(), tensor

    def wait_for(self, peer: int) -> Wait:
        return Wait("P2P transfer", ranks=[peer])

    def send_object(self, value: Any, destination: int, tag: int, direction: Direction) -> None:
        pass

    def receive_object(self, source: int, tag: int, direction: Direction) -> Mapping[str, ValueLayout]:
        return LAYOUTS


@pytest.fixture
def transport() -> NotedTransport:
    return NotedTransport()


@pytest.fixture
def peer(transport: NotedTransport) -> Peer:
    return Peer(cast(Transport, transport), 1, PAIRS, MICROBATCHES)


def test_receives_are_posted_in_order_also_when_a_layout_is_unknown(peer: Peer, transport: NotedTransport) -> None:
    unknown, known = (RemoteChannel(Boundary(0, stage, ["hidden"], []), peer, stage, None) for stage in (1, 2))
    known.boundary.set_layouts(LAYOUTS)

    unknown.post(Direction.ACTIVATION, 0)
    known.post(Direction.ACTIVATION, 0)
    assert transport.received == []

    assert known.take(Direction.ACTIVATION, 0) == [HIDDEN]
    assert transport.received == [(Direction.ACTIVATION, peer.tag(1, 0, 0)), (Direction.ACTIVATION, peer.tag(2, 0, 0))]


def test_a_send_above_the_limit_waits_for_the_oldest_after_the_first_step(
    peer: Peer, transport: NotedTransport
) -> None:
    channel = RemoteChannel(Boundary(0, 1, ["hidden"], []), peer, 0, 2)
    channel.boundary.set_layouts(LAYOUTS)
    for expected in ([], [peer.tag(0, 0, 0)]):
        transport.waited.clear()
        for microbatch in range(3):
            channel.give(Direction.ACTIVATION, microbatch, [HIDDEN.detach()])
        assert transport.waited == expected
        channel.finish()
        assert len(transport.waited) == 3


def test_in_the_global_order_a_first_step_has_the_limit_too(transport: NotedTransport) -> None:
    peer = Peer(cast(Transport, transport), 1, PAIRS, MICROBATCHES, in_order=True)
    channel = RemoteChannel(Boundary(0, 1, ["hidden"], []), peer, 0, 2)
    channel.boundary.set_layouts(LAYOUTS)
    for microbatch in range(3):
        channel.give(Direction.ACTIVATION, microbatch, [HIDDEN.detach()])
    assert transport.waited == [peer.tag(0, 0, 0)]

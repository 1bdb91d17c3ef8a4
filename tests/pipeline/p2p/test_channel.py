"""Channels: the limit of sends in flight."""

from typing import Any, cast

import pytest
import torch

from nxdpp.pipeline.p2p.channel import Peer, RemoteChannel
from nxdpp.pipeline.p2p.layout import Boundary, layout_of
from nxdpp.pipeline.p2p.transport import Direction, Transport
from nxdpp.ranks.faults.waits import Wait

HIDDEN = torch.randn(2, 3, 4, requires_grad=True)
LAYOUTS = {"hidden": layout_of(HIDDEN)}
PAIRS, MICROBATCHES = 4, 8


class NotedTransport:
    """Notes the sends that channels wait for."""

    is_in_host_memory = False

    def __init__(self) -> None:
        self.waited: list[int] = []

    def send(self, tensor: torch.Tensor, destination: int, direction: Direction, tag: int) -> tuple[Any, torch.Tensor]:
        transport = self

        class Sent:
            def wait(self) -> None:
                transport.waited.append(tag)

        return Sent(), tensor

    def wait_for(self, peer: int) -> Wait:
        return Wait("P2P transfer", ranks=[peer])

    def send_object(self, value: Any, destination: int, tag: int, direction: Direction) -> None:
        pass


@pytest.fixture
def transport() -> NotedTransport:
    return NotedTransport()


@pytest.fixture
def peer(transport: NotedTransport) -> Peer:
    return Peer(cast(Transport, transport), 1, PAIRS, MICROBATCHES)


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

"""The way over a border: through the transport to another rank, or by hand to a stage of the same rank."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from nxdpp.pipeline.p2p.boundary import Border, Crossing
from nxdpp.pipeline.p2p.transport import Direction, Transport, Work

Pending = list[Callable[[], torch.Tensor]]


class Link(Protocol):
    """Moves the tensors of one border, a microbatch at a time.

    A receive is posted, in the order of the schedule, before the value is taken; what is taken may have to be waited
    for. A give starts a send and does not wait.
    """

    border: Border

    def learn(self) -> None:
        """Have the maker's description, waiting for it if it is not known."""

    def describe(self) -> None:
        """Tell the user what the border's values look like."""

    def post(self, direction: Direction, microbatch: int) -> None:
        """Prepare to receive."""

    def take(self, direction: Direction, microbatch: int) -> list[torch.Tensor]:
        """The tensors of a microbatch, in the order of the border's crossings of this direction."""

    def give(self, direction: Direction, microbatch: int, tensors: Sequence[torch.Tensor]) -> None:
        """Send the tensors of a microbatch."""

    def release(self, direction: Direction, microbatch: int) -> None:
        """Let go of what was given, which is known to have arrived."""

    def finish(self) -> None:
        """The step is over: wait until all that was given has left."""


class LocalLink:
    """Both stages are on this rank: tensors change hands."""

    def __init__(self, border: Border) -> None:
        self.border = border
        self._under_way: dict[tuple[Direction, int], list[torch.Tensor]] = {}

    def learn(self) -> None:
        """The maker, on the same rank, has run before."""
        assert self.border.layouts is not None, "the maker's forward comes first"

    def describe(self) -> None:
        """Both sides share the border."""

    def post(self, direction: Direction, microbatch: int) -> None:
        """Nothing to prepare."""

    def take(self, direction: Direction, microbatch: int) -> list[torch.Tensor]:
        """What was given."""
        return self._under_way.pop((direction, microbatch))

    def give(self, direction: Direction, microbatch: int, tensors: Sequence[torch.Tensor]) -> None:
        """Keep the tensors until they are taken."""
        self._under_way[direction, microbatch] = list(tensors)

    def release(self, direction: Direction, microbatch: int) -> None:
        """Nothing is kept."""

    def finish(self) -> None:
        """Forget what nobody took."""
        self._under_way.clear()


class Stream:
    """The receives from one rank in one direction, posted in the order in which they are due.

    Without tags (NCCL) messages are told apart by their order alone. A receive whose layout is not known yet holds up
    those that are due after it, until it is needed, or one of those is.
    """

    def __init__(self) -> None:
        self._due: deque[tuple[RemoteLink, Direction, int]] = deque()

    def due(self, link: "RemoteLink", direction: Direction, microbatch: int) -> None:
        """Post the receive now, or as soon as those before it can be."""
        self._due.append((link, direction, microbatch))
        while self._due and self._due[0][0].border.layouts is not None:
            head, heading, number = self._due.popleft()
            head.post_now(heading, number)

    def needed(self, link: "RemoteLink", microbatch: int) -> None:
        """Post everything up to this receive."""
        while True:
            head, heading, number = self._due.popleft()
            head.learn()
            head.post_now(heading, number)
            if head is link and number == microbatch:
                return


class RemoteLink:
    """The other stage is on rank ``peer``.

    Args:
        border: what crosses.
        transport: the way to the other rank.
        peer: that rank, in the transport's groups.
        pair, pairs: which of how many pairs of stages of the two ranks the border is between; sets tags apart.
        microbatches: of a step.
        streams: the receives from that rank, by direction, of all its links to this one.
        under_way: how many microbatches may be sent one way and not be known to have arrived; ``None`` for any
            number, where ``release`` tells. In a first step it is any number, too: a receive whose layout is not
            known is posted so late that ranks could wait for each other for ever.
    """

    def __init__(
        self,
        border: Border,
        transport: Transport,
        peer: int,
        pair: int,
        pairs: int,
        microbatches: int,
        streams: dict[Direction, Stream],
        under_way: int | None,
    ) -> None:
        self.border = border
        self._transport = transport
        self._peer = peer
        self._pair = pair
        self._pairs = pairs
        self._microbatches = microbatches
        self._streams = streams
        self._under_way = under_way
        self._is_first_step = True
        self._posted: dict[tuple[Direction, int], Pending] = {}
        self._sent: dict[tuple[Direction, int], list[tuple[Work, torch.Tensor]]] = {}

    def learn(self) -> None:
        """Wait for the maker's description, once."""
        if self.border.layouts is None:
            self.border.agree(self._transport.receive_object(self._peer, self._pair))

    def describe(self) -> None:
        """Send the description to the user."""
        self._transport.send_object(self.border.layouts, self._peer, self._pair)

    def post(self, direction: Direction, microbatch: int) -> None:
        """Start to receive, after all that is due from the same rank before it."""
        self._streams[direction].due(self, direction, microbatch)

    def post_now(self, direction: Direction, microbatch: int) -> None:
        """Start to receive."""
        post = self._transport.post_receive
        self._posted[direction, microbatch] = [
            post(crossing.layout, self._peer, direction, self._tag(crossing, microbatch))
            for crossing in self._crossings(direction)
        ]

    def take(self, direction: Direction, microbatch: int) -> list[torch.Tensor]:
        """Wait for the tensors."""
        if not self.border.values:
            return []
        if (direction, microbatch) not in self._posted:
            self._streams[direction].needed(self, microbatch)
        return [wait() for wait in self._posted.pop((direction, microbatch))]

    def give(self, direction: Direction, microbatch: int, tensors: Sequence[torch.Tensor]) -> None:
        """Start to send; the memory is kept until ``release`` or the end of the step."""
        self._sent[direction, microbatch] = [
            self._transport.send(
                crossing.layout.arrange(tensor), self._peer, direction, self._tag(crossing, microbatch)
            )
            for crossing, tensor in zip(self._crossings(direction), tensors, strict=True)
        ]
        limit = None if self._is_first_step else self._under_way
        if limit is not None and len(self._sent) > limit:
            self.release(*next(iter(self._sent)))

    def release(self, direction: Direction, microbatch: int) -> None:
        """Wait for sends that are over, which gives their memory back; they may have been waited for before."""
        for work, _ in self._sent.pop((direction, microbatch), ()):
            work.wait()

    def finish(self) -> None:
        """Wait until everything has left."""
        for sent in list(self._sent):
            self.release(*sent)
        self._is_first_step = False

    def _crossings(self, direction: Direction) -> list[Crossing]:
        return self.border.activations if direction is Direction.ACTIVATION else self.border.gradients

    def _tag(self, crossing: Crossing, microbatch: int) -> int:
        return self._pair + self._pairs * (crossing.number * self._microbatches + microbatch)

"""Channels: transfer of one boundary's tensors, to another rank or within one.

::

    source stage                                    destination stage
    channel.give(ACTIVATION, mb, [(B, T, H)]) ────▶ channel.take(ACTIVATION, mb)    after channel.post(ACTIVATION, mb)
    channel.take(GRADIENT, mb) ◀──── channel.give(GRADIENT, mb, [(B, T, H)])
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nxdpp.devices.host_sends import Transfer
from nxdpp.pipeline.p2p.layout import Boundary, BoundaryTensor, TensorLayout, tensor_layout
from nxdpp.pipeline.p2p.transport import MISSING, Direction, Transport, is_mark, mark_like, zeros_like
from nxdpp.ranks.faults.board import board


class LocalChannel:
    """Channel between two stages of one rank: tensors change hands without a copy."""

    def __init__(self, boundary: Boundary) -> None:
        self.boundary = boundary
        self._given: dict[tuple[Direction, int], list[torch.Tensor | None]] = {}

    def receive_metadata(self) -> None:
        """Check that the source stage has run."""
        assert self.boundary.layouts, "the forward of the source stage comes first"

    def send_metadata(self) -> None:
        """Do nothing: both stages share the boundary."""

    def take(self, direction: Direction, microbatch: int) -> list[Any]:
        """Return the tensors that the other stage gave."""
        return self._given.pop((direction, microbatch))

    def give(self, direction: Direction, microbatch: int, tensors: Sequence[torch.Tensor | None]) -> None:
        """Keep the tensors until the other stage takes them."""
        self._given[direction, microbatch] = list(tensors)

    def finish(self) -> None:
        """Free tensors that were not taken."""
        self._given.clear()


class ReceiveQueue:
    """Receives from one rank in one direction, posted in the order of the schedule.

    NCCL has no tags: it matches messages only by their order. In a first step a receive waits for its layout. It
    then delays the receives after it, until one of them is needed. ``at_once`` waits for the layout instead: the
    receives of the global order are posted in their places.

    Attributes:
        due: the receives that wait for a layout, their own or one before it.
    """

    def __init__(self, at_once: bool) -> None:
        self._at_once = at_once
        self.due: deque[tuple[RemoteChannel, Direction, int]] = deque()

    def add(self, channel: "RemoteChannel", direction: Direction, microbatch: int) -> None:
        """Post the receive now, or as soon as all receives before it have been posted."""
        if self._at_once:
            channel.receive_metadata()
        self.due.append((channel, direction, microbatch))
        while self.due and self.due[0][0].boundary.layouts:
            head, heading, number = self.due.popleft()
            head.post_now(heading, number)

    def post_up_to(self, channel: "RemoteChannel", microbatch: int) -> None:
        """Post every receive up to this one, and wait for the layouts that this needs."""
        while True:
            head, heading, number = self.due.popleft()
            head.receive_metadata()
            head.post_now(heading, number)
            if head is channel and number == microbatch:
                return


class Peer:
    """Another rank, as all channels to it share it: order of receives and numbering of tags.

    Args:
        transport: the transfers of this rank.
        rank: the other rank, in the transport's groups.
        pairs: number of pairs of a stage here and a stage there.
        microbatches: number of microbatches of a step.
        in_order: ``True`` if receives are posted in the global order, in a first step too.
    """

    def __init__(self, transport: Transport, rank: int, pairs: int, microbatches: int, in_order: bool = False) -> None:
        self.transport = transport
        self.rank = rank
        self.wait = transport.wait_for(rank)
        self.receives = {direction: ReceiveQueue(in_order) for direction in Direction}
        self.in_order = in_order
        self._pairs = pairs
        self.microbatches = microbatches

    def metadata_tag(self, pair: int, form: int) -> int:
        """The tag of the layouts of microbatches of one form between the stages of ``pair``."""
        return pair + self._pairs * form

    def tag(self, pair: int, number: int, microbatch: int) -> int:
        """The tag of a boundary tensor of one microbatch between the stages of ``pair``."""
        return pair + self._pairs * (number * self.microbatches + microbatch)


class RemoteChannel:
    """Channel to a stage of another rank.

    Args:
        boundary: the boundary between the two stages.
        peer: the other rank.
        pair: number of the pair of stages, below the peer's ``pairs``.
        in_flight: limit of the microbatches in flight in one direction: sent, and not known to have been received. A
            further send waits for the oldest. ``None`` is no limit: ``release`` waits then. A first step has a limit
            only in the global order. Elsewhere a receive without a layout is posted late (``Note: late receive``):
            ranks could wait for each other.
        form: form of the channel's microbatches. Forms of one pair of stages have channels of their own.
        microbatches: number of microbatches of this form in a step; by default all.
    """

    def __init__(
        self,
        boundary: Boundary,
        peer: Peer,
        pair: int,
        in_flight: int | None,
        form: int = 0,
        microbatches: int | None = None,
    ) -> None:
        self.boundary = boundary
        self._peer = peer
        self._pair = pair
        self._metadata_tag = peer.metadata_tag(pair, form)
        self._microbatches = peer.microbatches if microbatches is None else microbatches
        self._in_flight = in_flight
        self._is_first_step = True
        self._posted: dict[tuple[Direction, int], list[Callable[[], torch.Tensor]]] = {}
        self._sent: dict[tuple[Direction, int], list[tuple[Transfer, torch.Tensor]]] = {}
        # The tensors of a microbatch with the tag of each message, from the first use on.
        self._messages: dict[tuple[Direction, int], list[tuple[BoundaryTensor, int]]] = {}
        # Microbatches of the step that had to send zeros for a missing gradient, by the tensor's number.
        self._missing: Counter[int] = Counter()

    def receive_metadata(self) -> None:
        """Receive the layouts, unless they are known."""
        if not self.boundary.layouts:
            self.boundary.set_layouts(
                self._peer.transport.receive_object(self._peer.rank, self._metadata_tag, Direction.ACTIVATION)
            )

    def send_metadata(self) -> None:
        """Start to send the layouts."""
        peer = self._peer
        peer.transport.send_object(self.boundary.layouts, peer.rank, self._metadata_tag, Direction.ACTIVATION)

    def post(self, direction: Direction, microbatch: int) -> None:
        """Start to receive, after all earlier receives from the same rank."""
        queue = self._peer.receives[direction]
        if self.boundary.layouts and not queue.due:
            self.post_now(direction, microbatch)
        else:
            queue.add(self, direction, microbatch)

    def post_now(self, direction: Direction, microbatch: int) -> None:
        """Start to receive."""
        rank, post = self._peer.rank, self._peer.transport.post_receive
        key = direction, microbatch
        self._posted[key] = posted = []
        for entry, tag in self._messages.get(key) or self._number(key):
            posted.append(post(entry.layout, rank, direction, tag))

    def take(self, direction: Direction, microbatch: int) -> list[Any]:
        """Wait for the tensors of a microbatch, such as one of (B, T, H), in the boundary's order.

        A gradient is ``None`` if the loss does not depend on its tensor. In a first step its layout is waited for too.
        """
        if not self.boundary.values:
            return []
        key = direction, microbatch
        if key not in self._posted:
            self._peer.receives[direction].post_up_to(self, microbatch)
        taken: list[Any] = []
        for wait in self._posted.pop(key):
            # A comprehension is a further call on Python 3.11.
            taken.append(wait())
        if direction is Direction.GRADIENT and taken and not self.boundary.knows_gradients:
            layouts = self._peer.transport.receive_object(self._peer.rank, self._metadata_tag, direction)
            self._set_gradient_layouts(layouts)
        for position, (entry, _) in enumerate(self._messages.get(key) or self._number(key)):
            tensor, layout = taken[position], entry.layout
            # On a device a gradient is looked at if the first microbatch did not have it: a later one may have it.
            if tensor is MISSING or (entry.is_none and is_mark(tensor)):
                taken[position] = None
            elif layout.own_stride is not None or tensor.stride() != layout.stride or tensor.is_cpu != layout.is_cpu:
                taken[position] = layout.restore(tensor)
        return taken

    def give(self, direction: Direction, microbatch: int, tensors: Sequence[torch.Tensor | None]) -> None:
        """Start to send the tensors of a microbatch; does not wait. A gradient may be ``None``.

        The memory is held until ``release`` or the end of the step.
        """
        peer, key = self._peer, (direction, microbatch)
        if direction is Direction.GRADIENT and tensors and not self.boundary.knows_gradients:
            layouts = [None if tensor is None else tensor_layout(tensor) for tensor in tensors]
            self._set_gradient_layouts(layouts)
            peer.transport.send_object(layouts, peer.rank, self._metadata_tag, direction)
        send = peer.transport.send
        self._sent[key] = sent = []
        for (entry, tag), tensor in zip(self._messages.get(key) or self._number(key), tensors, strict=True):
            if tensor is None:
                tensor = self._missing_gradient(entry)
            elif tensor.stride() != entry.layout.stride:
                tensor = entry.layout.arrange(tensor)
            sent.append(send(tensor, peer.rank, direction, tag))
        is_limited = peer.in_order or not self._is_first_step
        limit = self._in_flight if is_limited else None
        if limit is not None and len(self._sent) > limit:
            self.release(*next(iter(self._sent)))

    def release(self, direction: Direction, microbatch: int) -> None:
        """Wait for a finished send, which frees its memory; does nothing when that was done before."""
        board.wait = self._peer.wait
        for work, _ in self._sent.pop((direction, microbatch), ()):
            work.wait()
        board.wait = None

    def finish(self) -> None:
        """Wait until all tensors of the step have been sent."""
        for sent in list(self._sent):
            self.release(*sent)
        self._is_first_step = False
        if self._missing:
            self._refuse_zeros()

    def _number(self, key: tuple[Direction, int]) -> list[tuple[BoundaryTensor, int]]:
        """Return the tensors of a microbatch, each with its tag, and keep them once their layouts are known."""
        direction, microbatch = key
        entries = self.boundary.activations if direction is Direction.ACTIVATION else self.boundary.gradients
        messages = [(entry, self._peer.tag(self._pair, entry.number, microbatch)) for entry in entries]
        if self.boundary.layouts:
            self._messages[key] = messages
        return messages

    def _set_gradient_layouts(self, layouts: Sequence[TensorLayout | None]) -> None:
        self.boundary.set_gradient_layouts(layouts)
        self._messages.clear()

    def _missing_gradient(self, entry: BoundaryTensor) -> torch.Tensor:
        memory = entry.layout.allocate(torch.device("cpu"))
        if entry.is_none or self._peer.transport.is_in_host_memory:
            return mark_like(memory)
        self._missing[entry.number] += 1
        return zeros_like(memory)

    def _refuse_zeros(self) -> None:
        """Raise ``RuntimeError`` for a gradient that all microbatches of the step sent as zeros."""
        sent, self._missing = self._missing, Counter()
        for entry in self.boundary.gradients:
            if sent[entry.number] == self._microbatches:
                raise RuntimeError(
                    f"the loss of this step does not depend on {entry.value}, which stage {self.boundary.source} sends "
                    f"to stage {self.boundary.destination}; in the first step it did. Parameters before it have zeros "
                    f"as gradients, where one process has none: weight decay and momentum would then change them. Call "
                    f"refresh() on every rank before the first step after such a change of the modules."
                )


Channel = LocalChannel | RemoteChannel
"""Moves the tensors of one boundary, a microbatch at a time."""

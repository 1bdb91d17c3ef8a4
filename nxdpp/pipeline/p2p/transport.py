"""P2P transfers of tensors between the ranks of a pipeline, over torch.distributed.

On gloo each message has a tag. NCCL has no tags, and runs the operations of a communicator in the order of the calls.
Neighbours there have a communicator for each way. Both ranks send and post in one global order
(``schedules/lowering/global_order.py``), which excludes a deadlock.

Ranks of one host that would use gloo have a link of shared memory (``nxdpp/ranks/host_link.py``).

A gradient that one process would not have, because the loss does not depend on the tensor (``detach``), has a message
too. In host memory it is a mark, with a bit pattern that no computation gives, and the receiver sees it without waiting
for a device. On a device the receiver looks only where the first microbatch of the signature had no gradient. Elsewhere
it gets zeros of a negative sign, which change no sum.
"""

import ctypes
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from nxdpp.devices.host_sends import HostBuffers, HostSends, Transfer, unchanged
from nxdpp.devices.kinds import device_of
from nxdpp.pipeline.p2p.layout import TensorLayout
from nxdpp.ranks.faults.board import board
from nxdpp.ranks.faults.waits import Wait
from nxdpp.ranks.host_link import LARGEST_SLOT, HostLink
from nxdpp.ranks.transfer_groups import TransferGroups
from nxdpp.ranks.wire_form import packed, unpacked

# The gradient that a receive returns for a mark, and what a send holds that needs no tensor.
MISSING = torch.empty(0, device="cpu")

# By dtype: its first number as an integer, in C and in torch, and the bits of a not-a-number that no computation gives.
_MARKS = {
    dtype: (c_integer, integer, pattern)
    for c_integer, integer, pattern, dtypes in (
        (ctypes.c_int16, torch.int16, -0x1B, (torch.float16, torch.bfloat16, torch.complex32)),
        (ctypes.c_int32, torch.int32, -0x1A5A5B, (torch.float32, torch.complex64)),
        (ctypes.c_int64, torch.int64, -0x25A5A5A5A5A5B, (torch.float64, torch.complex128)),
    )
    for dtype in dtypes
}


_DTYPES_OF_NCCL = {
    torch.uint8, torch.int8, torch.bool, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
}  # fmt: skip


def zeros_like(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """-0.0 in the shape and strides of ``tensor``, in its dtype by default: neutral in each sum."""
    return torch.zeros_like(tensor, dtype=dtype, requires_grad=False).neg_()


def are_zeros(received: torch.Tensor) -> bool:
    """Return whether each element of ``received`` is -0.0; this waits for the device."""
    values = torch.view_as_real(received) if received.is_complex() else received
    return not values.any() and bool(values.signbit().all())


def mark_like(tensor: torch.Tensor) -> torch.Tensor:
    """The message for a missing gradient of a dense ``tensor``, in its shape, dtype and strides.

    Raises ``TypeError`` for a dtype of one byte.
    """
    mark = torch.empty_like(tensor, requires_grad=False)
    if mark.dtype not in _MARKS:
        raise TypeError(f"a gradient of {mark.dtype} between stages is missing, and this dtype has no mark for that.")
    _, integer, pattern = _MARKS[mark.dtype]
    memory = mark.as_strided((mark.numel(),), (1,))
    (torch.view_as_real(memory) if mark.is_complex() else memory).view(integer).fill_(pattern)
    return mark


def is_mark(received: torch.Tensor) -> bool:
    """Return whether the dense tensor ``received`` is a mark; this waits for the device of the tensor."""
    if received.dtype not in _MARKS or not received.numel():
        return False
    if received.device.type != "cpu":
        received = received.as_strided((1,), (1,)).cpu()
    # An operation of torch would take longer than the rest of a receive.
    c_integer, _, pattern = _MARKS[received.dtype]
    return c_integer.from_address(received.data_ptr()).value == pattern


class Direction(IntEnum):
    """Direction of a transfer: activations go to later stages, gradients to earlier ones."""

    ACTIVATION = 0
    GRADIENT = 1


# Between two ranks with several stages each, activations, gradients and the metadata of both go in the same direction.
_KINDS = 2 * len(Direction)


_GroupCall = Callable[[list[torch.Tensor], int, int], Transfer]


class _Copied:
    """A message that is in shared memory, and needs its tensor no more."""

    def wait(self) -> None:
        """Return at once."""


_COPIED = _Copied()


# Note: late receive
#
# A schedule says where a receive is posted: two compute actions ahead of its use on gloo, so that the transfer overlaps
# with computation (posted when needed, a step takes 1.15 times as long on 4 ranks), and in the global order on NCCL. In
# three cases this rank can post it only later, if at all, and each could have been a deadlock:
#
#     case                                  what is missing          posted
#     first step of a signature             the layout               when the metadata has come, in the queue's order
#     shared memory that has room           a message on gloo        never: it is taken from the memory when needed
#     shared memory without room            the sender's choice      when needed, where the memory says that gloo has it
#
# The first: `ReceiveQueue` keeps receives in the order of the schedule, and a rank that needs the third posts the first
# two before it, waiting for their layouts. So a rank blocks for nothing that the sender does not send before.
#
# The others: both ranks know that a message above LARGEST_SLOT bytes goes over gloo, and its receive is posted ahead. A
# smaller one is copied into the link if there is room, and else sent over gloo. The sender alone knows which. So the
# receiver must not post ahead: without a message its receive would stay, and take a later message of the tag.
#
# Nobody waits for ever, by two rules. Messages of one kind between two ranks are sent and received in one order. And a
# rank blocks on a receive only when the sender needs nothing that this rank has not posted yet: a send into a link
# waits for nobody, a send over gloo is waited for only by the action that proves its arrival (`releases.py`), and in a
# first step no send waits for an earlier one (`RemoteChannel`, in_flight), because the receiver may post late.
#
# `tests/schedules/transport_model` runs all families on a model of these rules.


class Transport:
    """Sends and receives of one rank of a pipeline; peers are ranks of the pipeline.

    With gloo and a device other than the CPU, tensors pass through host memory. For a device tensor gloo may return
    unchanged data without an error.

    Args:
        groups: the process groups of the transfers; ranks count within the pipeline.
        control: a group over the ranks of the pipeline that takes CPU tensors, for metadata.
        device: device of the tensors.
        report: called with an error of a thread of this transport, in that thread: makes the other ranks stop.

    Attributes:
        device: device of the tensors.
        is_in_host_memory: ``True`` if messages are sent and received in host memory.
    """

    def __init__(
        self,
        groups: TransferGroups,
        control: dist.ProcessGroup,
        device: torch.device,
        report: Callable[[BaseException], object] = lambda error: None,
    ) -> None:
        self._groups = groups
        self._control = control
        self.device = device
        self._rank = dist.get_rank(control)
        self._wire_device = torch.device("cpu") if groups.backend == "gloo" else device
        self._is_on_device = device.type != "cpu"
        self._through_host = groups.backend == "gloo" and self._is_on_device
        self._sends, self._buffers = HostSends(report), HostBuffers()
        self._has_tags = groups.has_tags
        self._has_all_dtypes = groups.backend == "gloo"
        # By the other rank: the call of its group that receives or sends, the number of the rank in it, and its link.
        self._receives: dict[int, tuple[_GroupCall, int, Wait, HostLink | None]] = {}
        self._sending: dict[int, tuple[_GroupCall, int, HostLink | None]] = {}
        self._metadata_sends: deque[tuple[Transfer, torch.Tensor]] = deque()
        self.is_in_host_memory = self._wire_device.type == "cpu"

    def post_receive(
        self, layout: TensorLayout, source: int, direction: Direction, tag: int
    ) -> Callable[[], torch.Tensor]:
        """Start to receive a tensor, such as one of (B, T, H); the returned function waits for and returns it.

        In host memory the mark of a missing gradient is seen, and ``MISSING`` is returned.
        """
        if self._through_host:
            buffer = self._buffers.take(layout.size, layout.stride, layout.dtype)
        else:
            buffer = torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device=self._wire_device)
        if source not in self._receives:
            group, number, _ = self._groups.between(source, self._rank)
            self._receives[source] = group.recv, number, self.wait_for(source), self._groups.links.get(source)
        receive, number, waits, link = self._receives[source]
        memory = buffer if self._has_all_dtypes and buffer.is_contiguous() else self._sent_memory(buffer)
        wire_tag = tag * _KINDS + direction if self._has_tags else 0
        work = receive([memory], number, wire_tag) if link is None or buffer.nbytes > LARGEST_SLOT else None

        def wait() -> torch.Tensor:
            board.wait = waits
            try:
                if work or link is None or not link.receive(buffer, wire_tag):
                    (work or receive([memory], number, wire_tag)).wait()
            except RuntimeError:
                self._sends.raise_error()
                raise
            board.wait = None
            received = MISSING if looks_for_marks and is_mark(buffer) else buffer
            if self._is_on_device:
                received = self._arrived(buffer, received, waits)
            return received

        looks_for_marks = direction is Direction.GRADIENT and self.is_in_host_memory
        return wait

    def _arrived(self, buffer: torch.Tensor, received: torch.Tensor, waits: Wait) -> torch.Tensor:
        """A message on the device: copied from ``buffer``, or when its stream has passed the wait."""
        if not self._through_host:
            if board.stream_waits is not None:
                board.stream_waits.add(waits)
            return received
        if received is not MISSING:
            received = device_of(self.device).from_host(buffer)
        self._buffers.give_back(buffer)
        return received

    def wait_for(self, peer: int) -> Wait:
        """Name the P2P transfers between this rank and ``peer``, for the time in which this rank waits for one."""
        return Wait("P2P transfer", self._control, [peer])

    def send(
        self, tensor: torch.Tensor, destination: int, direction: Direction, tag: int
    ) -> tuple[Transfer, torch.Tensor]:
        """Start to send a dense tensor, such as one of (B, T, H).

        The caller must keep the returned pair until its ``wait`` has returned.
        """
        # The memory of these has other values than the tensor, or there is none.
        if tensor.is_conj() or tensor.is_neg() or not (self._through_host or tensor.data_ptr()):
            memory = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            tensor = memory.copy_(tensor)
        if destination not in self._sending:
            group, _, number = self._groups.between(self._rank, destination)
            self._sending[destination] = group.send, number, self._groups.links.get(destination)
        send, number, link = self._sending[destination]
        wire_tag = tag * _KINDS + direction if self._has_tags else 0
        if self._through_host and tensor.device.type != "cpu":
            copied = unchanged(tensor, device_of(self.device).to_host(tensor))

            def start(message: torch.Tensor) -> Transfer:
                if link is not None and message.nbytes <= LARGEST_SLOT and link.send(message, wire_tag):
                    return _COPIED
                return send([message if message.is_contiguous() else self._sent_memory(message)], number, wire_tag)

            return self._sends.start(copied, start), tensor
        tensor = tensor.to(self._wire_device)
        if link is not None and tensor.nbytes <= LARGEST_SLOT and link.send(tensor, wire_tag):
            return _COPIED, MISSING
        memory = tensor if self._has_all_dtypes and tensor.is_contiguous() else self._sent_memory(tensor)
        return send([memory], number, wire_tag), tensor

    def _sent_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """The memory of a dense tensor: bytes for a dtype that NCCL does not have."""
        if self._has_all_dtypes or tensor.dtype in _DTYPES_OF_NCCL:
            return tensor if tensor.is_contiguous() else _flat(tensor)
        return _flat(tensor).view(torch.uint8)

    def finish(self) -> None:
        """Wait at the end of a step until all objects have been sent."""
        while self._metadata_sends:
            with Wait("descriptions of tensors", self._control):
                self._metadata_sends.popleft()[0].wait()

    def send_object(self, value: Any, destination: int, tag: int, direction: Direction) -> None:
        """Start to send a value that has a form (``wire_form``): its length, then the form.

        It describes tensors that go in ``direction``.
        """
        payload = torch.frombuffer(bytearray(packed(value)), dtype=torch.uint8)
        length = torch.tensor([payload.numel()], dtype=torch.int64, device="cpu")
        for message in (length, payload):
            work = self._control.send([message], destination, _wire_tag(len(Direction) + direction, tag))
            self._metadata_sends.append((work, message))

    def receive_object(self, source: int, tag: int, direction: Direction) -> Any:
        """Receive the value of a ``send_object``."""
        length = torch.empty(1, dtype=torch.int64, device="cpu")
        wire_tag = _wire_tag(len(Direction) + direction, tag)
        with self.wait_for(source):
            self._control.recv([length], source, wire_tag).wait()
            payload = torch.empty(int(length), dtype=torch.uint8, device="cpu")
            self._control.recv([payload], source, wire_tag).wait()
        return unpacked(payload.numpy().tobytes())


def _wire_tag(kind: int, tag: int) -> int:
    """A tag that differs between activations, gradients and their metadata: gloo's groups of all may be one."""
    return tag * _KINDS + kind


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous view of a dense tensor's memory, for any order of its strides."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())

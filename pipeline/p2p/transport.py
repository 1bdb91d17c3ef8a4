"""Moving tensors between the ranks of a pipeline, over torch.distributed.

On gloo each message has its tag. NCCL has none, and does what is asked of a communicator in the order of the calls:
a receive posted ahead would hold up a send behind it. So there are four: for activations and for gradients, each to
higher and to lower ranks (between ranks of several stages both kinds go both ways). What rules out deadlock: a
communicator carries messages of two ranks one way only, sent and received in the same order, and a rank blocks on a
receive only for a value whose sender needs nothing that this rank has not already posted.
"""

import pickle
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Protocol

import torch
import torch.distributed as dist

from nxdpp.pipeline.p2p.layout import TensorLayout


class Direction(IntEnum):
    """Which way a value travels."""

    ACTIVATION = 0
    GRADIENT = 1


# Between two ranks that have several stages each, activations, gradients and descriptions go the same way.
_DESCRIPTION = len(Direction)
_KINDS = len(Direction) + 1


class Work(Protocol):
    """A transfer under way."""

    def wait(self) -> Any:
        """Block until it is over, or until the current stream is made to wait for it."""


class Transport:
    """Sends and receives of one rank of a pipeline; peers are ranks of ``groups``.

    Args:
        groups: the process group over the ranks of the pipeline for each direction, to lower (``False``) and to
            higher ranks (``True``).
        control: a group over the same ranks that takes CPU tensors, for descriptions.
        device: where the tensors are.

    With gloo and a device other than the CPU, tensors pass through host memory: gloo given such a tensor may
    return unchanged data without an error.
    """

    def __init__(
        self,
        groups: dict[tuple[Direction, bool], dist.ProcessGroup],
        control: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._groups = groups
        self._control = control
        self._device = device
        self._rank = dist.get_rank(control)
        self._on_host = dist.get_backend(groups[Direction.ACTIVATION, True]) == "gloo"
        self._wire_device = torch.device("cpu") if self._on_host else device
        self._descriptions: deque[tuple[Work, torch.Tensor]] = deque()

    def post_receive(
        self, layout: TensorLayout, source: int, direction: Direction, tag: int
    ) -> Callable[[], torch.Tensor]:
        """Start to receive a tensor; the returned function waits for it and gives it."""
        buffer = layout.allocate(self._wire_device)
        work = self._groups[direction, self._rank > source].recv([_flat(buffer)], source, _wire_tag(direction, tag))

        def arrived() -> torch.Tensor:
            work.wait()
            return buffer.to(self._device)

        return arrived

    def send(self, tensor: torch.Tensor, destination: int, direction: Direction, tag: int) -> tuple[Work, torch.Tensor]:
        """Start to send a dense tensor; what is returned must be kept until its ``wait`` is over."""
        tensor = tensor.to(self._wire_device)
        return self._groups[direction, destination > self._rank].send(
            [_flat(tensor)], destination, _wire_tag(direction, tag)
        ), tensor

    def finish(self) -> None:
        """The step is over: wait until all objects have left."""
        while self._descriptions:
            self._descriptions.popleft()[0].wait()

    def send_object(self, value: Any, destination: int, tag: int) -> None:
        """Start to send any picklable value, its length first."""
        payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        length = torch.tensor([payload.numel()], dtype=torch.int64)
        for message in (length, payload):
            work = self._control.send([message], destination, _wire_tag(_DESCRIPTION, tag))
            self._descriptions.append((work, message))

    def receive_object(self, source: int, tag: int) -> Any:
        """Receive what ``send_object`` sent."""
        length = torch.empty(1, dtype=torch.int64)
        wire_tag = _wire_tag(_DESCRIPTION, tag)
        self._control.recv([length], source, wire_tag).wait()
        payload = torch.empty(int(length), dtype=torch.uint8)
        self._control.recv([payload], source, wire_tag).wait()
        return pickle.loads(payload.numpy().tobytes())


def _wire_tag(kind: int, tag: int) -> int:
    """Tells messages apart between which gloo knows no other difference: its groups of all kinds may be one."""
    return tag * _KINDS + kind


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous view of a dense tensor's memory, whatever its strides."""
    if tensor.is_contiguous():
        return tensor
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())

"""Messages of a generation: tensors and values between the ranks of a pipeline, and commands for all ranks.

Commands go from the driver to the first tensor rank of each stage, and from there to its tensor group.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nxdpp.devices.host_sends import Transfer
from nxdpp.pipeline.p2p.layout import TensorLayout
from nxdpp.pipeline.p2p.transport import Direction, Transport
from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults import failure_watch
from nxdpp.ranks.faults.waits import Wait
from nxdpp.ranks.transfer_groups import TransferGroups
from nxdpp.ranks.wire_form import packed, unpacked
from nxdpp.schedules.lowering.transport_rules import RULES

_VALUES, _COMMANDS = 0, 1
_FRAME = 2048
"""Bytes of the first message of a command; what is longer follows in a second one."""
_CPU = torch.device("cpu")


class _Commands(Transport):
    """Transfers of commands."""

    def wait_for(self, peer: int) -> Wait:
        """Name what this rank waits for."""
        return Wait("next token of generate", self._control, [peer])


class RankMessages:
    """Messages of this rank; ranks count within its pipeline.

    Args:
        device: the device of the stages.
        driver: the rank that gives the commands.
    """

    def __init__(self, device: torch.device, driver: int) -> None:
        groups = parallel_state.get_pipeline_transfer_groups()
        control = parallel_state.get_pipeline_control_group()
        self._tensors = Transport(groups, control, device, failure_watch.report)
        on_host = groups if groups.has_tags else TransferGroups(RULES["gloo"], "gloo", {}, control, control, {})
        self._host = Transport(on_host, control, _CPU, failure_watch.report)
        self._commands = _Commands(on_host, control, _CPU, failure_watch.report)
        self.rank = parallel_state.get_pipeline_model_parallel_rank()
        self.driver = driver
        self._others = [other for other in range(parallel_state.get_pipeline_model_parallel_size()) if other != driver]
        self._tensor_rank = parallel_state.get_tensor_model_parallel_rank()
        self._tensor_ranks = parallel_state.get_tensor_model_parallel_size()
        self.is_driver = self.rank == driver and self._tensor_rank == 0
        self._sent: deque[tuple[Transfer, torch.Tensor]] = deque()

    def send(self, tensor: torch.Tensor, destination: int) -> None:
        """Start to send a dense tensor to the rank ``destination``, with the same tensor rank."""
        transport = self._host if tensor.device.type == "cpu" else self._tensors
        self._start(transport, tensor, destination, _VALUES)

    def receive(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, source: int, on_host: bool = False
    ) -> torch.Tensor:
        """Receive a tensor; with ``on_host`` one in host memory."""
        return _received(self._host if on_host else self._tensors, size, stride, dtype, source, _VALUES)

    def send_value(self, value: Any, destination: int) -> None:
        """Start to send a value that has a form (``wire_form``)."""
        self._send_bytes(packed(value), destination, _VALUES)

    def receive_value(self, source: int) -> Any:
        """Receive the value of a ``send_value``."""
        return unpacked(self._received_bytes(self._commands_of(source, _VALUES)))

    def command(self, value: Any) -> None:
        """Send ``value`` to all other ranks of this replica; on the driver."""
        form = packed(value)
        for other in self._others:
            self._send_bytes(form, other, _COMMANDS)
        self._relay(form)

    def next_command(self) -> Any:
        """Receive the next value of ``command``; on the other ranks."""
        if self._tensor_rank == 0:
            form = self._received_bytes(self._commands_of(self.driver))
            self._relay(form)
        else:
            form = self._received_bytes(self._relayed)
        return unpacked(form)

    def finish(self) -> None:
        """Wait until all messages have been sent."""
        while self._sent:
            self._wait_for_oldest()

    def _start(self, transport: Transport, tensor: torch.Tensor, destination: int, tag: int) -> None:
        self._sent.append(transport.send(tensor, destination, Direction.ACTIVATION, tag))
        # No wait: the receiver may wait for a forward of this rank.
        while self._sent and _is_sent(self._sent[0][0]):
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        with Wait("P2P transfer", parallel_state.get_pipeline_control_group()):
            self._sent.popleft()[0].wait()

    def _send_bytes(self, form: bytes, destination: int, tag: int) -> None:
        for frame in _frames(form):
            self._start(self._commands, frame, destination, tag)

    def _received_bytes(self, received: Callable[[int], torch.Tensor]) -> bytes:
        """Return the form of messages of which ``received`` returns the next one, of a number of bytes."""
        first = received(_FRAME).numpy().tobytes()
        length = int.from_bytes(first[:8], "little")
        rest = b"" if length <= _FRAME - 8 else received(length - _FRAME + 8).numpy().tobytes()
        return first[8 : 8 + length] + rest

    def _commands_of(self, source: int, tag: int = _COMMANDS) -> Callable[[int], torch.Tensor]:
        return lambda size: _received(self._commands, [size], [1], torch.uint8, source, tag)

    def _relay(self, form: bytes) -> None:
        """Send ``form`` to the others of this tensor group: no collective, as they may be in one of a layer."""
        for other in range(1, self._tensor_ranks):
            for frame in _frames(form):
                group = parallel_state.get_tensor_control_group()
                self._sent.append((group.send([frame], other, _COMMANDS), frame))

    def _relayed(self, size: int) -> torch.Tensor:
        group, frame = parallel_state.get_tensor_control_group(), torch.empty(size, dtype=torch.uint8, device="cpu")
        with Wait("next token of generate", group, [0]):
            group.recv([frame], 0, _COMMANDS).wait()
        return frame


def _is_sent(transfer: Any) -> bool:
    """Return whether a wait for ``transfer`` returns at once. A message in shared memory is one that has been sent."""
    return not hasattr(transfer, "is_completed") or bool(transfer.is_completed())


def _frames(form: bytes) -> list[torch.Tensor]:
    """The messages of ``form``: one of a fixed length, and one of the rest if there is one."""
    framed = len(form).to_bytes(8, "little") + form
    parts = [framed[:_FRAME].ljust(_FRAME, b"\0"), framed[_FRAME:]]
    return [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts if part]


def _received(
    transport: Transport, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, source: int, tag: int
) -> torch.Tensor:
    layout = TensorLayout(torch.Size(size), tuple(stride), dtype, requires_grad=False)
    return transport.post_receive(layout, source, Direction.ACTIVATION, tag)()

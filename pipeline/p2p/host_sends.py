"""Sends of device tensors through host memory, of which the program waits for none.

::

    program     stage 1 forward ─▶ start copy ─▶ next action ─────────────▶
    device                              └─ copy to the host ─┐
    this thread                                              └─▶ send ─▶

The thread waits for the copies and sends in the order of the calls.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch


class Started(Protocol):
    """A send that has been started."""

    def wait(self) -> Any:
        """Block until the send is finished."""


class HostSend:
    """A send that starts once its tensor is in host memory."""

    def __init__(self, started: "Future[tuple[Started, torch.Tensor]]") -> None:
        self._started = started

    def wait(self) -> None:
        """Block until the send is finished; raises the error of the copy or of the send."""
        # The message must live until its end.
        work, _message = self._started.result()
        work.wait()


class HostSends:
    """The sends of one rank, in order."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "sends through host memory")

    def start(self, copied: Callable[[], torch.Tensor], send: Callable[[torch.Tensor], Started]) -> HostSend:
        """Start a send: ``copied`` waits for the tensor in host memory, and ``send`` starts to send it."""

        def sent() -> tuple[Started, torch.Tensor]:
            message = copied()
            return send(message), message

        return HostSend(self._thread.submit(sent))


class HostBuffers:
    """Memory of received tensors, used again for those of the same bytes."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.Size, tuple[int, ...], torch.dtype], list[torch.Tensor]] = {}

    def take(self, size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised host memory for a tensor."""
        free = self._free.get((size, stride, dtype))
        return free.pop() if free else torch.empty_strided(size, stride, dtype=dtype)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Free ``buffer``, which no copy reads any more."""
        self._free.setdefault((buffer.size(), buffer.stride(), buffer.dtype), []).append(buffer)

"""Sends of device tensors through host memory, of which the program waits for none.

::

    program     stage 1 forward ─▶ start copy ─▶ next action ─────────────▶
    device                              └─ copy to the host ─┐
    this thread                                              └─▶ send ─▶

The thread waits for the copies and sends in the order of the calls.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from nxdpp.devices.daemon_thread import DaemonThread
from nxdpp.ground.torch_names import VERSION


class Transfer(Protocol):
    """A transfer in flight."""

    def wait(self) -> Any:
        """Block until the transfer is finished; on CUDA make the current stream wait for it."""


class HostWork:
    """A send or a collective that begins once its tensors are in host memory.

    The result of ``begun`` is the work in flight, and what must live until its end, such as a message.
    """

    def __init__(self, begun: "Future[Any]") -> None:
        self._begun = begun

    def wait_begun(self) -> None:
        """Block until it has begun: one that the caller makes then follows it. Raises its error."""
        self._begun.result()

    def is_completed(self) -> bool:
        """Return whether ``wait`` returns or raises at once."""
        begun = self._begun
        return begun.done() and (begun.exception() is not None or bool(begun.result()[0].is_completed()))

    def wait(self) -> None:
        """Block until it is finished; raises the error of the copies, or its own."""
        self._begun.result()[0].wait()


class HostSends:
    """The sends of one rank, in order.

    Args:
        report: called in the thread with the first error. No message is sent after it, and a peer may wait for one.
    """

    def __init__(self, report: Callable[[BaseException], object]) -> None:
        self._thread = DaemonThread("sends through host memory")
        self._report = report
        self._error: BaseException | None = None

    def start(self, copied: Callable[[], torch.Tensor], send: Callable[[torch.Tensor], Transfer]) -> HostWork:
        """Start a send: ``copied`` waits for the tensor in host memory, and ``send`` starts to send it.

        Raises the error of an earlier send.
        """
        self.raise_error()

        def sent() -> tuple[Transfer, torch.Tensor]:
            self.raise_error()
            try:
                message = copied()
                return send(message), message
            except BaseException as error:
                error.add_note("in the thread that sends tensors of a device through host memory")
                self._error = error
                self._report(error)
                raise

        return HostWork(self._thread.submit(sent))

    def raise_error(self) -> None:
        """Raise the error of a send in the thread, if there is one: it is the cause of errors after it."""
        if self._error is not None:
            raise self._error


def unchanged(tensor: torch.Tensor, copied: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Return ``copied``, a copy of ``tensor`` that has begun, with a check that nothing changes ``tensor`` meanwhile.

    It raises ``RuntimeError`` then: the copy may have the values from before the change, or those from after it.
    """
    version = _version(tensor)
    changed = (
        f"a tensor of shape {list(tensor.shape)} was changed in place while it was copied to be sent to another stage. "
        f"Change a copy of it (hidden = hidden + ..., hidden.clone())."
    )

    def checked() -> torch.Tensor:
        try:
            message = copied()
        except RuntimeError as error:
            # torch_xla fails in the midst of a change, which counts at its end.
            error.add_note(f"Perhaps {changed}")
            raise
        if _version(tensor) != version:
            raise RuntimeError(changed)
        return message

    return checked


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else VERSION.of(tensor)


# Of the steps of several shapes; memory of others is not kept.
_MOST_LAYOUTS = 64


class HostBuffers:
    """Memory of received tensors, used again for tensors of the same size, strides and dtype."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.Size, tuple[int, ...], torch.dtype], list[torch.Tensor]] = {}

    def take(self, size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised host memory for a tensor."""
        free = self._free.get((size, stride, dtype))
        if free:
            return free.pop()
        # A later step may train with memory that an evaluation has made.
        with torch.inference_mode(mode=False):
            return torch.empty_strided(size, stride, dtype=dtype, device="cpu")

    def give_back(self, buffer: torch.Tensor) -> None:
        """Free ``buffer``, which no copy reads any more."""
        layout = buffer.size(), buffer.stride(), buffer.dtype
        self._free[layout] = [*self._free.pop(layout, []), buffer]
        if len(self._free) > _MOST_LAYOUTS:
            del self._free[next(iter(self._free))]

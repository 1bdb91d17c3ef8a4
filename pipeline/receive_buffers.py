"""Host memory to receive into, used again as soon as nobody reads it any more.

New memory costs the operating system more than the transfer of a small message: it is cleared page by page.
"""

from collections import deque

import torch

from nxdpp.pipeline.layout import TensorLayout

# The buffer's own, and that of the storage object that is asked.
_FREE_USES = 2


class ReceiveBuffers:
    """Buffers of one step; as many as there were in use at once."""

    def __init__(self) -> None:
        self._buffers: dict[TensorLayout, deque[torch.Tensor]] = {}

    def take(self, layout: TensorLayout) -> torch.Tensor:
        """A buffer on the CPU whose memory nobody else has. What is read from it must be another tensor of the same
        memory (``detach``), by which its use is noticed."""
        buffers = self._buffers.setdefault(layout, deque())
        if buffers and _uses(buffers[0]) == _FREE_USES:
            buffers.rotate(-1)
        else:
            buffers.append(layout.allocate(torch.device("cpu")))
        return buffers[-1]

    def clear(self) -> None:
        """Let go of all memory."""
        self._buffers.clear()


def _uses(buffer: torch.Tensor) -> int:
    uses: int = torch._C._storage_Use_Count(buffer.untyped_storage()._cdata)
    return uses

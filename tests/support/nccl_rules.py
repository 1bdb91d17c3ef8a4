"""The rules of NCCL's transport over gloo, in the process of a rank; call these before the groups are made."""

from collections.abc import Callable
from typing import Any

import torch

from nxdpp.pipeline.p2p.transport import Transport
from nxdpp.schedules.lowering.transport_rules import NCCL, RULES


def use_nccl_rules() -> None:
    """Take NCCL's groups, order of receives and matching by order on gloo."""
    RULES["gloo"] = NCCL


def wait_for_each_message() -> None:
    """Wait for the end of each message as soon as it is started, as with ``CUDA_LAUNCH_BLOCKING=1``."""
    post_receive, send = Transport.post_receive, Transport.send

    def receiving(self: Transport, *arguments: Any) -> Callable[[], torch.Tensor]:
        received = post_receive(self, *arguments)()
        return lambda: received

    def sending(self: Transport, *arguments: Any) -> Any:
        work, tensor = send(self, *arguments)
        work.wait()
        return _Done(), tensor

    Transport.post_receive = receiving  # type: ignore[assignment, method-assign]
    Transport.send = sending  # type: ignore[assignment, method-assign]


class _Done:
    """A message that has ended; gloo would wait for a second one."""

    def wait(self) -> None:
        """Return at once."""

"""Data-parallel replicas start with the same values: gradients are averaged, values never are."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from nxdpp.pipeline.agreement.fingerprint import digest
from nxdpp.pipeline.agreement.same_step import check_replicas

# Enough to tell another seed or another checkpoint, at no cost; not a proof that all elements are equal.
_ELEMENTS = 1024


def check_replicas_have_equal_values(
    parameters: Iterable[tuple[str, nn.Parameter]], origin: str | None, group: dist.ProcessGroup
) -> None:
    """Raise ``RuntimeError`` where a sample of some 1024 elements of a parameter differs; collective over ``group``.

    ``origin`` is a line that says where the values come from, shown with the difference.
    """
    if dist.get_world_size(group) > 1:
        samples = [f"values of {name}: {_sample(parameter).hex()}" for name, parameter in parameters]
        check_replicas([*([] if origin is None else [origin]), *samples], group)


def _sample(parameter: nn.Parameter) -> bytes:
    flat = parameter.detach().reshape(-1)
    few = flat[:: max(1, flat.numel() // _ELEMENTS)].contiguous()
    return digest(few.view(torch.uint8).cpu().numpy().tobytes())

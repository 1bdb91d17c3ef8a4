"""Verification that the data-parallel replicas have the same parameters, with the same values.

Gradients are averaged over the replicas; values never are.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nxdpp.pipeline.agreement.fingerprint import Fingerprint, digest, fingerprint, rank_name, show_difference

# Enough to notice another seed or another checkpoint at no cost. It does not verify that all elements are equal.
_ELEMENTS = 1024


def check_replicas(lines: Sequence[str], group: dist.ProcessGroup) -> None:
    """Raise ``RuntimeError`` unless all ranks of the data-parallel ``group`` give the same ``lines``; collective.

    The lines list the parameters whose gradients are about to be averaged.
    """
    own = fingerprint(lines)
    digests: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(digests, own.digest, group=group)
    if len(set(digests)) == 1:
        return
    texts: list[Any] = [None] * len(digests)
    dist.all_gather_object(texts, tuple(own), group=group)
    other = next(rank for rank, theirs in enumerate(digests) if theirs != digests[0])
    first, second = (rank_name(group, rank, "data-parallel rank") for rank in (0, other))
    raise RuntimeError(
        f"{second} has other parameters than {first}:\n"
        f"{show_difference(first, Fingerprint(*texts[0]), second, Fingerprint(*texts[other]))}"
        f"Wrap the same model with the same arguments in every data-parallel replica, after the same "
        f"torch.manual_seed(...)."
    )


def check_replica_values(
    parameters: Iterable[tuple[str, nn.Parameter]], origin: str | None, group: dist.ProcessGroup
) -> None:
    """Raise ``RuntimeError`` where a sample of about 1024 elements of a parameter differs; collective over ``group``.

    ``origin`` is a line about the origin of the values. It is shown with the difference.
    """
    if dist.get_world_size(group) > 1:
        samples = [f"values of {name}: {_sample(parameter).hex()}" for name, parameter in parameters]
        check_replicas([*([] if origin is None else [origin]), *samples], group)


def _sample(parameter: nn.Parameter) -> bytes:
    flat = parameter.detach().reshape(-1)
    few = flat[:: max(1, flat.numel() // _ELEMENTS)].contiguous()
    return digest(few.view(torch.uint8).cpu().numpy().tobytes())

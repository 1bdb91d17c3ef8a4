"""Verification that the data-parallel replicas have the same parameters, with the same values.

Gradients are averaged over the replicas; values never are.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from nxdpp.pipeline.agreement.difference import show_difference
from nxdpp.pipeline.agreement.fingerprint import Fingerprint, fingerprint, rank_name
from nxdpp.pipeline.agreement.same_values import sample


def check_replicas(lines: Sequence[str], group: dist.ProcessGroup, seed: int | None = None) -> None:
    """Raise ``RuntimeError`` unless all ranks of the data-parallel ``group`` give the same ``lines``; collective.

    The lines list the parameters whose gradients are about to be averaged. ``seed`` is the one with which the rank
    wrapped the model. It may differ, and is shown with a difference.
    """
    own = fingerprint(lines)
    digests: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(digests, own.digest, group=group)
    if len(set(digests)) == 1:
        return
    texts: list[Any] = [None] * len(digests)
    dist.all_gather_object(texts, (tuple(own), seed), group=group)
    other = next(rank for rank, theirs in enumerate(digests) if theirs != digests[0])
    first, second = (rank_name(group, rank, "data-parallel rank") for rank in (0, other))
    (first_text, first_seed), (second_text, second_seed) = texts[0], texts[other]
    seeds = f"torch.initial_seed() was {first_seed} and {second_seed} when they wrapped the model.\n"
    difference = show_difference(first, Fingerprint(*first_text), second, Fingerprint(*second_text))
    raise RuntimeError(
        f"{second} has {difference.has} than {first}:\n{difference.lines}"
        f"{seeds if first_seed != second_seed else ''}"
        f"Wrap the same model with the same arguments in every data-parallel replica, after the same "
        f"torch.manual_seed(...)."
    )


def check_replica_values(
    parameters: Iterable[tuple[str, nn.Parameter]],
    origin: str | None,
    group: dist.ProcessGroup,
    seed: int | None = None,
    lines: Sequence[str] = (),
) -> None:
    """Raise ``RuntimeError`` where a sample of about 1024 elements of a parameter differs; collective over ``group``.

    ``origin`` is a line about the origin of the values. It is shown with the difference. ``seed`` and ``lines`` are as
    for ``check_replicas``.
    """
    if dist.get_world_size(group) > 1:
        samples = [f"values of {name}: {sample(parameter).hex()}" for name, parameter in parameters]
        check_replicas([*([] if origin is None else [origin]), *lines, *samples], group, seed)

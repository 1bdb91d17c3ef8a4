"""Verification that the data-parallel replicas have the same parameters, with the same values.

Gradients are averaged over the replicas; values never are.
"""

from collections.abc import Iterable, Sequence

import torch.distributed as dist
from torch import nn

from nxdpp.agreement.comparison import unequal
from nxdpp.agreement.difference import difference_of
from nxdpp.agreement.same_values import sample

SAME_MODEL = (
    "Wrap the same model with the same arguments in every data-parallel replica, after the same torch.manual_seed(...)."
)


def check_replicas(
    lines: Sequence[str], group: dist.ProcessGroup, seed: int | None = None, remedy: str = SAME_MODEL
) -> None:
    """Raise ``RuntimeError`` unless all ranks of the data-parallel ``group`` give the same ``lines``; collective.

    The lines list the parameters whose gradients are about to be averaged. ``seed`` is the one with which the rank
    wrapped the model. It may differ, and is shown with a difference. The message ends with ``remedy``.
    """
    found = unequal(list(lines), group, note=seed)
    if found is None:
        return
    first, second = found.names("data-parallel rank")
    seeds = "torch.initial_seed() was {} and {} when they wrapped the model.\n".format(*found.notes)
    difference = difference_of(first, found.values[0], second, found.values[1])
    raise RuntimeError(
        f"{second} has {difference.has} than {first}:\n{difference.lines}"
        f"{seeds if found.notes[0] != found.notes[1] else ''}{remedy}"
    )


def check_replica_values(
    parameters: Iterable[tuple[str, nn.Parameter]],
    origin: str | None,
    group: dist.ProcessGroup,
    seed: int | None = None,
    lines: Sequence[str] = (),
    remedy: str = SAME_MODEL,
) -> None:
    """Raise ``RuntimeError`` if a sample of about 1024 elements of a parameter differs; collective over ``group``.

    ``origin`` is a line about the origin of the values. It is shown with the difference. ``seed``, ``lines`` and
    ``remedy`` are as for ``check_replicas``.
    """
    if dist.get_world_size(group) > 1:
        samples = [f"values of {name}: {sample(parameter).hex()}" for name, parameter in parameters]
        check_replicas([*([] if origin is None else [origin]), *lines, *samples], group, seed, remedy)

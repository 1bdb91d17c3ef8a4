"""Verification that the data-parallel replicas have the same parameters, with the same values.

Gradients are averaged over the replicas; values never are.
"""

import logging
from collections.abc import Iterable, Sequence

import torch.distributed as dist
from torch import nn

from nxdpp.agreement.comparison import unequal
from nxdpp.agreement.difference import difference_of
from nxdpp.agreement.same_values import sample
from nxdpp.ranks import parallel_state

_logger = logging.getLogger(__name__)

SAME_MODEL = (
    "Wrap the same model with the same arguments in every data-parallel replica, after the same torch.manual_seed(...)."
)


def check_replicas(lines: Sequence[str], seed: int | None = None, remedy: str = SAME_MODEL) -> None:
    """Raise ``RuntimeError`` unless all data-parallel replicas give the same ``lines``; collective over them.

    The lines list the parameters whose gradients are about to be averaged. ``seed`` is the one with which the rank
    wrapped the model. It may differ, and is shown with a difference. The message ends with ``remedy``.
    """
    found = unequal(list(lines), parallel_state.get_data_parallel_control_group(), note=seed)
    if found is None:
        return
    first, second = found.names("data-parallel rank")
    seeds = "torch.initial_seed() was {} and {} when they wrapped the model.\n".format(*found.notes)
    difference = difference_of(first, found.values[0], second, found.values[1])
    raise RuntimeError(
        f"{second} has {difference.has} than {first}:\n{difference.lines}"
        f"{seeds if found.notes[0] != found.notes[1] else ''}{remedy}"
    )


def warn_of_equal_batches(hashes: Sequence[int]) -> None:
    """Warn on rank 0 if all its data-parallel replicas have the same ``hashes``, not all 0; collective over them."""
    group = parallel_state.get_data_parallel_control_group()
    if dist.get_process_group_ranks(group)[0] != 0:
        return
    are_equal = unequal(list(hashes), group) is None
    if are_equal and any(hashes) and dist.get_rank() == 0:
        _logger.warning(
            "all %d data-parallel replicas have the same batch, so they compute the same gradients: give each its own "
            "rows. nxdpp.data_parallel_sampler(dataset) does. A DistributedSampler takes "
            "num_replicas=parallel_state.get_data_parallel_size() and rank=parallel_state.get_data_parallel_rank().",
            dist.get_world_size(group),
        )


def check_replica_values(
    parameters: Iterable[tuple[str, nn.Parameter]],
    origin: str | None,
    seed: int | None = None,
    lines: Sequence[str] = (),
    remedy: str = SAME_MODEL,
) -> None:
    """Raise ``RuntimeError`` if a sample of about 1024 elements of a parameter differs; collective over the replicas.

    ``origin`` is a line about the origin of the values. It is shown with the difference. ``seed``, ``lines`` and
    ``remedy`` are as for ``check_replicas``.
    """
    if parallel_state.get_data_parallel_size() > 1:
        samples = [
            f"values of {name}: {sample(parameter).hex()}" for name, parameter in parameters if not parameter.is_meta
        ]
        check_replicas([*([] if origin is None else [origin]), *lines, *samples], seed, remedy)

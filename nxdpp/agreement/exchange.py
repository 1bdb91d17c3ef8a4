"""Exchanges between data-parallel replicas, which first verify that they are about to make the same one.

Replicas have the same parameters, with the same values: gradients are averaged over the replicas, values never are.

A backend pairs the messages of two replicas only by their order. So each exchange begins with a hash of its name::

    replica 0   run_eval: number of labels        16 bytes  ──▶  different: both raise, with both names
    replica 1   run_train: average of gradients   16 bytes  ──▶
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nxdpp.agreement.comparison import unequal
from nxdpp.agreement.difference import difference_of
from nxdpp.agreement.fingerprint import canonical, digest
from nxdpp.agreement.same_values import sample
from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults import failure_watch
from nxdpp.ranks.faults.board import board
from nxdpp.ranks.faults.waits import Wait
from nxdpp.ranks.group_values import extremes, gather_values

_logger = logging.getLogger(__name__)

_REMEDY = "Wrap the same model with the same arguments, and set the same modes, in every data-parallel replica."
SAME_MODEL = (
    "Wrap the same model with the same arguments in every data-parallel replica, after the same torch.manual_seed(...)."
)


class ReplicaExchanges:
    """The exchanges of a pipelined model with its replicas; ``settings``, equal on all, decide which there are."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = [f"{name}={canonical(value)}" for name, value in settings.items()]

    def begin(self, name: str, details: Sequence[str] = ()) -> None:
        """Verify that all replicas begin the exchange ``name`` with the same ``details``; collective over them.

        Raises ``RuntimeError`` on all of them for a difference, before a value is sent.
        """
        if parallel_state.get_replica_size() > 1:
            self.start(name, details, ())()

    def start(self, name: str, details: Sequence[str], notes: Sequence[int]) -> Callable[[], list[int]]:
        """Start the exchange ``name``, and return a function that ends it; both are collective over the replicas.

        The function returns the largest of each of ``notes``, integers. It raises as ``begin`` does. Equal notes take
        one message, which is in flight while this rank computes.
        """
        lines = [name, *self._settings, *details, *map(str, notes)]
        number = int.from_bytes(digest("\n".join(lines).encode()), "little") >> 2
        both = torch.tensor([number, -number], device="cpu")
        group = parallel_state.get_replica_control_group()
        work = dist.all_reduce(both, dist.ReduceOp.MAX, group, async_op=True)

        def end() -> list[int]:
            with failure_watch.reported():
                assert work is not None
                with Wait(name, group):
                    work.wait()
                if both[0] == -both[1]:
                    return list(notes)
                difference = _difference(name, self._settings, list(details), group)
                if difference is not None:
                    raise RuntimeError(difference)
                return extremes(notes, group, name=name)[1]

        return end

    def gathered(self, name: str, values: Sequence[float]) -> list[list[float]]:
        """Return the ``values`` of each replica in the exchange ``name``; collective over them, between their hosts.

        Raises as ``begin`` does.
        """
        if parallel_state.get_replica_size() == 1:
            return [list(values)]
        self.begin(name)
        with failure_watch.reported():
            return gather_values(list(values), parallel_state.get_replica_control_group(), name)


def _difference(name: str, settings: list[str], details: list[str], group: dist.ProcessGroup) -> str | None:
    """Return how the replicas differ, and ``None`` if they do not; collective over them."""
    found = unequal((name, settings, details), group, note=board.position().call)
    if found is None:
        return None
    first, second = found.names("data-parallel rank")
    (first_name, *first_lines), (second_name, *second_lines) = found.values
    first_call, second_call = found.notes
    if first_name != second_name and first_lines[0] == second_lines[0]:
        return (
            f"{first} is in {first_call} ({first_name}), and {second} in {second_call} ({second_name}). Make the same "
            f"calls in every data-parallel replica. A run_eval is such a call with loss_normalization='tokens', with "
            f"broadcast_and_average_loss=True and with experts over ranks."
        )
    # Settings come first: they decide which details a step has.
    kind = 0 if first_lines[0] != second_lines[0] else 1
    there = [line for line in first_lines[kind] if line not in second_lines[kind]]
    here = [line for line in second_lines[kind] if line not in first_lines[kind]]
    return (
        f"{second} has other settings than {first}:\n  {first}: {', '.join(there)[:500] or 'none of these'}\n"
        f"  {second}: {', '.join(here)[:500] or 'none of these'}\n{_REMEDY}"
    )


def check_replicas(lines: Sequence[str], seed: int | None = None, remedy: str = SAME_MODEL) -> None:
    """Raise ``RuntimeError`` unless all data-parallel replicas give the same ``lines``; collective over them.

    The lines list the parameters whose gradients are about to be averaged. ``seed`` is the one with which the rank
    wrapped the model. It may differ, and is shown with a difference. The message ends with ``remedy``.
    """
    found = unequal(list(lines), parallel_state.get_replica_control_group(), note=seed)
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
    """Warn on rank 0 if all its data-parallel replicas have the same ``hashes``, not all 0; collective over them.

    Ranks that share each sequence have the same batch.
    """
    if parallel_state.get_data_parallel_size() == 1:
        return
    group = parallel_state.get_replica_control_group()
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
    if parallel_state.get_replica_size() > 1:
        samples = [
            f"values of {name}: {sample(parameter).hex()}" for name, parameter in parameters if not parameter.is_meta
        ]
        check_replicas([*([] if origin is None else [origin]), *lines, *samples], seed, remedy)

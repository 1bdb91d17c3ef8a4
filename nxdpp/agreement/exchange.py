"""Exchanges between data-parallel replicas, which first verify that they are about to make the same one.

A backend pairs the messages of two replicas only by their order. So each exchange begins with a hash of its name::

    replica 0   run_eval: number of labels        16 bytes  ──▶  different: both raise, with both names
    replica 1   run_train: average of gradients   16 bytes  ──▶
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from nxdpp.agreement.comparison import unequal
from nxdpp.agreement.fingerprint import canonical, digest
from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults import failure_watch
from nxdpp.ranks.faults.board import board
from nxdpp.ranks.faults.waits import Wait
from nxdpp.ranks.group_values import extremes, gather_values

_REMEDY = "Wrap the same model with the same arguments, and set the same modes, in every data-parallel replica."


class ReplicaExchanges:
    """The exchanges of a pipelined model with its replicas; ``settings``, equal on all, decide which there are."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = [f"{name}={canonical(value)}" for name, value in settings.items()]

    def begin(self, name: str, details: Sequence[str] = ()) -> None:
        """Verify that all replicas begin the exchange ``name`` with the same ``details``; collective over them.

        Raises ``RuntimeError`` on all of them for a difference, before a value is sent.
        """
        if parallel_state.get_data_parallel_size() > 1:
            self.start(name, details, ())()

    def start(self, name: str, details: Sequence[str], notes: Sequence[int]) -> Callable[[], list[int]]:
        """Start the exchange ``name``, and return a function that ends it; both are collective over the replicas.

        The function returns the largest of each of ``notes``, integers. It raises as ``begin`` does. Equal notes take
        one message, which is in flight while this rank computes.
        """
        lines = [name, *self._settings, *details, *map(str, notes)]
        number = int.from_bytes(digest("\n".join(lines).encode()), "little") >> 2
        both = torch.tensor([number, -number], device="cpu")
        group = parallel_state.get_data_parallel_control_group()
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
        if parallel_state.get_data_parallel_size() == 1:
            return [list(values)]
        self.begin(name)
        with failure_watch.reported():
            return gather_values(list(values), parallel_state.get_data_parallel_control_group(), name)


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
            f"calls in every data-parallel replica. A run_eval is such a call with loss_normalization='tokens' and "
            f"with broadcast_and_average_loss=True."
        )
    # Settings come first: they decide which details a step has.
    kind = 0 if first_lines[0] != second_lines[0] else 1
    there = [line for line in first_lines[kind] if line not in second_lines[kind]]
    here = [line for line in second_lines[kind] if line not in first_lines[kind]]
    return (
        f"{second} has other settings than {first}:\n  {first}: {', '.join(there)[:500] or 'none of these'}\n"
        f"  {second}: {', '.join(here)[:500] or 'none of these'}\n{_REMEDY}"
    )

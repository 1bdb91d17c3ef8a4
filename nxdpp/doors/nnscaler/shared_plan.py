"""One plan for all ranks: rank 0 finds or makes it, and the other hosts get it or have it.

::

    rank 0          find or make the file ──┬─ text ─▶ every rank takes the layout
    rank 0 of       new, and a strategy:  ◀─┘
    another host    write the file               then each rank verifies the file of its host

Without ``torch.distributed`` each process does so by itself. Policies are deterministic, so the files are equal.
"""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from nxdpp.agreement.comparison import gathered, unequal
from nxdpp.agreement.together import all_together
from nxdpp.doors.nnscaler.enums import BroadcastGenFilesStrategy, ReuseType
from nxdpp.doors.nnscaler.saved_plan import SavedPlan, config_difference
from nxdpp.doors.nnscaler.unit_layout import UnitLayout

_KINDS = (ValueError, TypeError, NotImplementedError)


def shared_layout(
    plan: SavedPlan,
    make: Callable[[], UnitLayout],
    reuse: ReuseType,
    strategy: BroadcastGenFilesStrategy,
    load_module: bool,
) -> UnitLayout:
    """Return the layout of the plan, which is then in the file; collective over the world if there is one.

    Args:
        plan: the file of this process.
        make: makes the layout of a new plan. It runs on rank 0.
        reuse: the plan that may be taken.
        strategy: whether other hosts get a new plan. Without ``torch.distributed`` there are none.
        load_module: whether every host needs the file, because this call loads a module.

    Raises:
        RuntimeError: for a file that does not fit or is in use, by the table of ``saved_plan``, and for a host without
            the file.
        Exception: an error of ``make``. The other ranks raise it too.
    """
    if dist.is_available() and dist.is_initialized():
        with _host_group() as group:
            return _on_all_ranks(plan, make, reuse, strategy, load_module, group)
    return plan.find_or_make(reuse, make)[0]


def verify_same_plan(plan: SavedPlan, layout: UnitLayout) -> None:
    """Raise ``RuntimeError`` on all ranks unless each of them has this layout and configuration; collective.

    For ranks that each found or made the plan before ``torch.distributed`` was there.
    """
    with _host_group() as group:
        found = unequal(plan.text_of(layout), group)
    if found is None:
        return
    difference = config_difference(*reversed(found.values))
    if difference is not None:
        raise RuntimeError(_other_configs(found.ranks[1], difference))
    raise RuntimeError(
        f"rank {found.ranks[1]} has another plan than rank 0 for the same compute_config: give all ranks the same "
        f"module and policy, or call torch.distributed.init_process_group() before parallelize: rank 0's plan is then "
        f"that of all"
    )


def _other_configs(rank: int, difference: str) -> str:
    return f"the ranks gave other compute_configs: on rank {rank} {difference} on rank 0. Give all ranks the same"


def _on_all_ranks(
    plan: SavedPlan,
    make: Callable[[], UnitLayout],
    reuse: ReuseType,
    strategy: BroadcastGenFilesStrategy,
    load_module: bool,
    group: Any,
) -> UnitLayout:
    def find() -> tuple[str | None, bool]:
        if dist.get_rank() > 0:
            return None, False
        _, is_new = plan.find_or_make(reuse, make)
        return plan.read(), is_new

    text, is_new = all_together(find, gather=lambda own: gathered(own, group), kinds=_KINDS)[0]
    assert text is not None, "rank 0 has read the file"
    problem = None
    if is_new and strategy is not BroadcastGenFilesStrategy.NONE and _is_first_of_host():
        problem = _problem_of_writing(plan, text)
    if load_module:
        _verify_files(plan, text, is_new, problem, group)
    elif problem is not None:
        raise RuntimeError(problem)
    return plan.layout_in(text)


def _problem_of_writing(plan: SavedPlan, text: str) -> str | None:
    """Write ``text`` unless it is there. Return the error of a folder that cannot be written, which all ranks raise."""
    try:
        if plan.read() != text:
            plan.write(text)
    except OSError as error:
        return f"{socket.gethostname()} cannot write {plan.path} ({error})"
    return None


def _problem_of_file(plan: SavedPlan, text: str) -> str | None:
    try:
        own = plan.read()
    except OSError as error:
        return f"{socket.gethostname()} cannot read {plan.path} ({error})"
    return None if own == text else f"{socket.gethostname()} has {'no' if own is None else 'another'} plan {plan.path}"


def _verify_files(plan: SavedPlan, text: str, is_new: bool, problem: str | None, group: Any) -> None:
    """Raise ``RuntimeError`` on all ranks unless each has ``text`` in its file, and its ``compute_config``."""
    dist.barrier(group=group)  # every host has written
    state = problem or _problem_of_file(plan, text)
    states = gathered((state, plan.other_config(text)), group)
    for rank, (_, difference) in enumerate(states):
        if difference is not None:
            raise RuntimeError(_other_configs(rank, difference))
    wrong = next((f"rank {rank} on {each}" for rank, (each, _) in enumerate(states) if each is not None), None)
    if wrong is None:
        return
    remedy = (
        "give broadcast_strategy='all', a gen_savedir that all hosts share, or copy rank 0's file"
        if is_new
        else "rank 0 reuses its plan, and reused plans are not sent: copy its file, or give reuse='override' and "
        "broadcast_strategy='all'"
    )
    raise RuntimeError(f"{wrong}, unlike rank 0: {remedy}")


def _is_first_of_host() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


@contextmanager
def _host_group() -> Iterator[Any]:
    """Group of all ranks for messages in host memory, whatever the backend of the world."""
    group = dist.new_group(backend="gloo")
    try:
        yield group
    finally:
        dist.destroy_process_group(group)

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
from nxdpp.doors.nnscaler.saved_plan import SavedPlan
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
        _verify_configs(plan, group)
        found = unequal(plan.text_of(layout), group)
    if found is not None:
        raise RuntimeError(
            f"rank {found.ranks[1]} has another plan than rank 0 for the same compute_config: give all ranks the same "
            f"module and policy, or call torch.distributed.init_process_group() before parallelize: rank 0's plan is "
            f"then that of all"
        )


def _verify_configs(plan: SavedPlan, group: Any) -> None:
    """Raise ``RuntimeError`` on all ranks unless each has rank 0's ``compute_config``; collective."""
    first, *others = gathered(plan.compute_config, group)
    for rank, config in enumerate(others, 1):
        for name, value in config.items():
            if value != first[name]:
                raise RuntimeError(
                    f"the ranks gave other compute_configs: on rank {rank} {name} is {value!r}, and {first[name]!r} on "
                    f"rank 0. Give all ranks the same"
                )


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
    writes = is_new and strategy is not BroadcastGenFilesStrategy.NONE and _is_first_of_host()
    problem = _problem(plan, text, writes) if writes else None
    if load_module:
        dist.barrier(group=group)  # every host has written
        _verify_configs(plan, group)
        _verify_files(problem or _problem(plan, text), is_new, group)
    elif problem is not None:
        raise RuntimeError(problem)
    return plan.layout_in(text)


def _problem(plan: SavedPlan, text: str, writes: bool = False) -> str | None:
    """Return why the file of this host has not ``text``, or ``None``. With ``writes`` the file gets it."""
    try:
        own = plan.read()
        if writes and own != text:
            plan.write(text)
            return None
    except OSError as error:
        return f"{socket.gethostname()} cannot {'write' if writes else 'read'} {plan.path} ({error})"
    return None if own == text else f"{socket.gethostname()} has {'no' if own is None else 'another'} plan {plan.path}"


def _verify_files(problem: str | None, is_new: bool, group: Any) -> None:
    """Raise ``RuntimeError`` on all ranks if one of them has a ``problem``; collective."""
    problems = gathered(problem, group)
    wrong = next((f"rank {rank} on {each}" for rank, each in enumerate(problems) if each is not None), None)
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

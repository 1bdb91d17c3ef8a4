"""Who takes part in a case: every family, run by all that have it."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from benchmarks.compare.alternation import Times, take_turns
from benchmarks.compare.contender import BY_HAND, PEER, US, Contender, check_step
from benchmarks.compare.handwritten import Handwritten
from benchmarks.compare.job import Job
from benchmarks.compare.ours import Ours
from benchmarks.compare.peer import SCHEDULES, Peer
from benchmarks.compare.session import Effort
from nxdpp.schedules.families.registry import find_family


class Entry(NamedTuple):
    """A contender of a case and its times."""

    name: str
    family: str
    times: Times


def run_field(
    families: Iterable[str], make_job: Callable[[int], Job], check_job: Callable[[int], Job], effort: Effort
) -> list[Entry]:
    """Check all contenders against one process, then let them take turns; collective, the same on all ranks.

    Args:
        families: which schedules.
        make_job: from stages a rank to what is run.
        check_job: the same with the same gradients, for one process, which need not sleep.
        effort: how many steps.

    Raises:
        AssertionError: for a contender whose loss or gradients are not those of one process.
    """
    names: list[tuple[str, str]] = []
    contenders: list[Contender] = []
    for family in families:
        chunks = find_family(family).default_chunks
        job = make_job(chunks)
        loss, gradients = check_job(chunks).reference()
        for name, make in makers(job, family, chunks):
            contender = make()
            check_step(contender, loss, gradients)
            contenders.append(contender)
            names.append((name, family))
    return [Entry(*name, times) for name, times in zip(names, take_turns(contenders, effort), strict=True)]


def makers(job: Job, family: str, chunks: int) -> Sequence[tuple[str, Callable[[], Contender]]]:
    """All that run ``family``, and how each is made."""
    found: list[tuple[str, Callable[[], Contender]]] = []
    if family == "1f1b":
        found.append((BY_HAND, partial(Handwritten, job)))
    if family in SCHEDULES:
        found.append((PEER, partial(Peer, job, family, chunks)))
    found.append((US, partial(Ours, job, family, chunks)))
    return found

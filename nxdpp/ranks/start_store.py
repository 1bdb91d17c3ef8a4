"""Part of the world's store that belongs to one start of the ranks.

Agents of torchrun keep one store over restarts. The keys of an earlier start are still there: its failure, its counts,
its addresses. No variable of torchrun numbers the starts alike on all hosts: an agent that only joins again does not
count a restart. So the ranks agree on a name of the start, over the store itself::

    rank 2   writes a new question       reads the answer          counts itself
    rank 0   reads all questions         answers each new one      waits until all are counted

Rank 0 may read a question of an earlier start. No rank waits for that answer, and rank 0 reads again.
"""

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from uuid import uuid4

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, not in its __all__

from nxdpp.counted import counted
from nxdpp.ranks.faults.waits import first_names

_QUESTION = "nxdpp_question"
_ANSWER = "nxdpp_answer"
_STARTED = "started"

_LIMIT = timedelta(minutes=30)
_SECONDS_TO_A_LINE = 60.0  # imports may take long
_READ_AGAIN_SECONDS = 0.2
_FASTEST_POLL_SECONDS, _SLOWEST_POLL_SECONDS = 0.005, 0.1


def store_of_start(store: Store, rank: int, world_size: int) -> Store:
    """Return ``store`` under a prefix that belongs to this start, the same on all ranks; collective over all ranks.

    Every minute that a rank is missing, a line names it. Raises ``RuntimeError`` after 30 minutes.
    """
    name = uuid4().hex if rank == 0 else _ask(store, rank)
    own = PrefixStore(f"nxdpp_start_{name}", store)
    if rank > 0:
        own.add(_STARTED, 1)
    else:
        _answer_all(store, own, name, world_size)
    return own


def _ask(store: Store, rank: int) -> str:
    """Return the name that rank 0 tells."""
    question = uuid4().hex
    store.set(f"{_QUESTION}_{rank}", question)
    answer = f"{_ANSWER}_{question}"
    if rank == 1:
        _wait_until(
            lambda: store.check([answer]), lambda: "rank 1 waits for rank 0, or for ranks that rank 0 names, to start"
        )
    else:
        # Blocks without further requests: with thousands of ranks the store has enough to do.
        store.wait([answer], _LIMIT)
    name = store.get(answer).decode()
    store.delete_key(answer)
    return name


def _answer_all(store: Store, own: Store, name: str, world_size: int) -> None:
    """Tell ``name`` to all other ranks; returns when all know it."""
    questions = [f"{_QUESTION}_{rank}" for rank in range(1, world_size)]
    answered: set[bytes] = set()
    last_read = -_READ_AGAIN_SECONDS

    def answer_new() -> None:
        nonlocal last_read
        last_read = time.monotonic()
        asked = [question for question in store.multi_get(questions) if question not in answered]
        if asked:
            answers = [f"{_ANSWER}_{question.decode()}" for question in asked]
            store.multi_set(answers, [name] * len(asked))  # type: ignore[attr-defined]  # missing in torch's stubs
            answered.update(asked)

    def all_have_started() -> bool:
        if own.add(_STARTED, 0) == len(questions):
            return True
        if time.monotonic() - last_read >= _READ_AGAIN_SECONDS and store.check(questions):
            answer_new()
        return False

    def line() -> str:
        missing = [rank for rank, question in enumerate(questions, 1) if not store.check([question])]
        who = first_names(missing) if missing else counted(len(questions) - own.add(_STARTED, 0), "rank")
        return f"rank 0 waits for {who} to start"

    _wait_until(all_have_started, line)


def _wait_until(condition: Callable[[], bool], line: Callable[[], str]) -> None:
    """Wait, and print ``line()`` every minute; ``RuntimeError`` with it after the limit."""
    began = time.monotonic()
    next_line = began + _SECONDS_TO_A_LINE
    pause = _FASTEST_POLL_SECONDS
    while not condition():
        now = time.monotonic()
        if now > began + _LIMIT.total_seconds():
            raise RuntimeError(f"{line()} for {_LIMIT}: start all ranks, and see their own errors")
        if now > next_line:
            next_line = now + _SECONDS_TO_A_LINE
            print(f"{line()}, for {now - began:.0f} s", file=sys.stderr, flush=True)
        time.sleep(pause)
        pause = min(pause * 1.5, _SLOWEST_POLL_SECONDS)

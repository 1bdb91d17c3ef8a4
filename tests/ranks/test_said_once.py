"""Lines and warnings of transformers: each text once a job."""

import io
import logging
import os
import threading
import warnings
from contextlib import redirect_stderr
from typing import Any

import pytest

from nxdpp import parallel_state
from nxdpp.ranks import said_once
from nxdpp.ranks.said_once import LIBRARY, FirstRankToSay
from tests.support.run_ranks import run_ranks


def say(rank: int) -> tuple[str, list[str]]:
    printed, shown = io.StringIO(), []
    library = logging.getLogger(LIBRARY)
    for _ in range(2):
        library.addHandler(logging.StreamHandler(printed))
    library.setLevel(logging.WARNING)
    warnings.simplefilter("always")
    warnings.showwarning = lambda message, *_: shown.append(str(message))
    # A second world replaces the filters of the first one.
    for _ in range(2):
        parallel_state.initialize_model_parallel()
        logger = logging.getLogger(f"{LIBRARY}.models.llama")
        for _ in range(2):
            logger.warning("%s of all ranks", "text")
            warnings.warn_explicit("of all ranks", UserWarning, f"/env{rank}/{LIBRARY}/utils/generic.py", 1)
        logger.warning(f"of rank {rank}")
        warnings.warn_explicit("of the program", UserWarning, "/home/train.py", 1)
        parallel_state.destroy_model_parallel()
    return printed.getvalue(), shown


def test_a_text_of_all_ranks_is_printed_once_each_time() -> None:
    printed, shown = zip(*run_ranks(3, say), strict=True)
    # By two handlers, twice in two worlds.
    assert "".join(printed).count("text of all ranks") == 2 * 2 * 2
    assert [each.count(f"of rank {rank}") for rank, each in enumerate(printed)] == [4] * 3
    assert sum(each.count("of all ranks") for each in shown) == 2 * 2
    assert [each.count("of the program") for each in shown] == [2] * 3


def bars(rank: int, variable: str) -> list[tuple[bool, bool, str]]:
    """Return whether transformers and datasets draw bars, and a bar, before a world, in it and after it."""
    if variable:
        os.environ[variable] = "0"
    import datasets
    from transformers.utils import logging as library

    # A module of another test may have turned them off in the server of which this process is a fork.
    library.enable_progress_bar()

    def now() -> tuple[bool, bool, str]:
        drawn = io.StringIO()
        with redirect_stderr(drawn):
            datasets.Dataset.from_dict({"a": [1]}).map(lambda row: row, desc="over rows")
            list(library.tqdm([1], desc="over weights"))
        return library.is_progress_bar_enabled(), not datasets.are_progress_bars_disabled(), drawn.getvalue()

    found = [now()]
    # Rank 1 has a setting of its own in the second world.
    for _ in range(2):
        parallel_state.initialize_model_parallel()
        found.append(now())
        parallel_state.destroy_model_parallel()
        found.append(now())
        if rank == 1:
            library.disable_progress_bar()
    return found


def test_one_rank_draws_bars_unless_the_user_has_set_them() -> None:
    first, other = run_ranks(2, bars, "")
    assert [each[:2] for each in first] == [(True, True)] * 5
    assert [each[:2] for each in other] == [(True, True), (False, False), (True, True), (False, False), (False, True)]
    assert all("over rows" in drawn and "over weights" in drawn for _, _, drawn in first)
    assert other[1][2] == ""
    _, other = run_ranks(2, bars, "HF_DATASETS_DISABLE_PROGRESS_BARS")
    assert [each[:2] for each in other] == [(True, True), (False, True), (True, True), (False, True), (False, True)]


class CountingStore:
    """A store that answers that another rank was first, until it stops to answer."""

    def __init__(self) -> None:
        self.asked = 0
        self.answers = threading.Event()
        self.answers.set()

    def clone(self) -> "CountingStore":
        return self

    def add(self, key: str, number: int) -> int:
        self.asked += 1
        self.answers.wait()
        return 2


def record(message: str, *arguments: Any) -> logging.LogRecord:
    return logging.LogRecord(LIBRARY, logging.WARNING, "", 1, message, arguments, None)


class NoText:
    def __repr__(self) -> str:
        raise ValueError("no text")


def test_a_fork_and_a_rank_without_an_answer_print(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = CountingStore()
    first = FirstRankToSay(store)
    assert not first.filter(record("known"))
    assert first.filter(record("%s", NoText()))
    # Logging tells of arguments that do not fit.
    assert not first.filter(record("%s and %s", 1))
    assert store.asked == 2

    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        assert first.filter(record("known"))
    assert store.asked == 2

    monkeypatch.setattr(said_once, "_SECONDS", 0.05)
    store.answers.clear()
    assert first.filter(record("known"))
    store.answers.set()
    assert first.filter(record("known"))
    assert store.asked == 3


def test_each_handler_gets_the_answer_of_its_record() -> None:
    store: Any = CountingStore()
    first = FirstRankToSay(store)
    one, other = record("one"), record("other")
    assert [first.filter(each) for each in (one, other, one)] == [False] * 3
    assert store.asked == 2

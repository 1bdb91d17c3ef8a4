"""Hang watch: a rank that has not moved for the limit calls the roll, and ends the job if it hangs.

In a job that moves it asks the store nothing. A thread samples this rank's progress. The failure watch asks ``find``
in its polls, and answers the roll calls of other ranks.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from nxdpp.ranks.faults.board import board
from nxdpp.ranks.faults.ending_process import print_line, wait_until
from nxdpp.ranks.faults.local_peers import LocalPeers
from nxdpp.ranks.faults.progress import Progress, script_collective
from nxdpp.ranks.faults.roll_call import Answer, judge, own_answer
from nxdpp.ranks.faults.timeouts import Timeouts
from nxdpp.ranks.faults.watch_store import Ending, RollCall, WatchStore, launcher_has_store

_ANSWER_SECONDS = 3.5  # wait for answers; other ranks poll at least every 2 s
_SILENCE_SECONDS = 5.0  # the least time after which the store counts as silent
_MOST_SECONDS_OF_A_SAMPLE = 10.0
_PAUSE_SECONDS = 0.1  # between two looks at another rank's roll call


class HangWatch:
    """Roll calls of one rank."""

    def __init__(self, store: WatchStore, peers: LocalPeers, timeouts: Timeouts) -> None:
        self._store, self._peers = store, peers
        self._rank, self._world_size = peers.rank, peers.world_size
        self._timeouts = timeouts
        self._limit = limit = timeouts.hang
        self._sample_seconds = min(max(limit / 20, 0.1), _MOST_SECONDS_OF_A_SAMPLE)
        self._progress = Progress(board, 2 * self._sample_seconds, timeouts.compile)
        self._answers = threading.Lock()
        self._answered = 0
        self._postponed_by = 0
        self._next_limit = limit
        self._asked: float | None = None
        self._collective = "", 0.0

    def start(self, left: threading.Event, stop_without_store: Callable[[str, list[int]], None]) -> None:
        """Start to sample. ``stop_without_store`` ends the process if the store does not answer."""
        if self._limit:
            arguments = (left, stop_without_store)
            threading.Thread(target=self._sample, args=arguments, name="nxdpp progress", daemon=True).start()

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Time in which the failure watch asks the store."""
        self._asked = time.monotonic()
        try:
            yield
        finally:
            self._asked = None

    def find(self) -> Ending | None:
        """The ending of a job that hangs; ``None`` if it does not, as far as this rank can tell."""
        if not self._limit or not self._is_over(self._next_limit):
            if self._progress.unmoved_seconds < self._limit:
                self._next_limit = self._limit
            return None
        answers = self._call_roll(_ANSWER_SECONDS)
        if answers is None:
            return None
        present, missing, call = answers
        verdict = judge(present, missing, self._rank, self._timeouts)
        if not verdict.hangs:
            self._store.close_roll_call(call, goes_on=bool(verdict.sentence))
            self._next_limit = self._progress.unmoved_seconds + 0.25 * self._limit
            if verdict.sentence:
                print_line(f"{verdict.sentence}. The job goes on: {verdict.reason}")
                self._postpone()
            return None
        print_line(verdict.report)
        return Ending("fault", verdict.rank, verdict.sentence, list(verdict.stopped))

    def answer(self, call: RollCall) -> None:
        """Answer a roll call once, and learn its result."""
        if call.goes_on and call.number > self._postponed_by:
            self._postponed_by = call.number
            self._postpone()
        with self._answers:
            if call.is_open and call.number > self._answered:
                self._answered = call.number
                answer = own_answer(board, self._progress, self._peers)
                self._store.answer_roll_call(call, self._rank, asdict(answer))

    def gone(self, seconds: float) -> list[int]:
        """The ranks that do not answer a roll call within ``seconds``.

        Ranks of one host lose their connections together. Each waits for the roll call of another, and calls its own if
        that one has ended without an ending of the job.
        """
        deadline = time.monotonic() + 3 * seconds
        while (called := self._call_roll(seconds)) is None:
            state = self._store.state()
            if isinstance(state, Ending) or time.monotonic() > deadline:
                return []
            if isinstance(state, RollCall):
                self.answer(state)
            time.sleep(_PAUSE_SECONDS)
        _, missing, call = called
        self._store.close_roll_call(call)
        return list(missing)

    def _call_roll(self, seconds: float) -> tuple[dict[int, Answer], Sequence[int], RollCall] | None:
        """Call the roll; returns the answers and the ranks without one, or ``None`` if another state came first."""
        call = self._store.open_roll_call(self._rank)
        if call is None:
            return None
        self.answer(call)

        def is_over() -> bool:
            expected = self._world_size - len(self._store.departures()) - len(self._peers.stopped())
            return self._store.number_of_answers(call) >= expected or isinstance(self._store.state(), Ending)

        wait_until(is_over, seconds)
        if isinstance(self._store.state(), Ending):
            return None
        answers = {}
        for rank in range(self._world_size):
            answer = self._store.answer_of(call, rank)
            if answer is not None:
                answers[rank] = Answer(**answer)
        departed = self._store.departures()
        missing = [rank for rank in range(self._world_size) if rank not in answers and rank not in departed]
        return answers, missing, call

    def _postpone(self) -> None:
        """Call the roll again after twice the time, so that notices do not repeat often."""
        self._next_limit = 2 * max(self._progress.unmoved_seconds, self._limit)

    def stands_in_collective(self) -> bool:
        """Return whether the script has been in one collective of its own for the limit; asked at each poll."""
        place, now = script_collective(board.thread), time.monotonic()
        if place != self._collective[0]:
            self._collective = place, now
        return bool(place) and 0 < self._limit <= now - self._collective[1]

    def _is_over(self, limit: float) -> bool:
        # Where messages stop a stream, all hosts may be in the program while their devices wait.
        waits = board.stream_waits is not None and board.stream_waits.first() is not None
        return (bool(board.position().call) or waits) and self._progress.unmoved_seconds >= limit

    def _sample(self, left: threading.Event, stop_without_store: Callable[[str, list[int]], None]) -> None:
        while not left.wait(self._sample_seconds):
            self._progress.sample()
            asked = self._asked
            is_silent = asked is not None and time.monotonic() - asked > max(self._limit, _SILENCE_SECONDS)
            if is_silent and self._is_over(self._limit):
                stopped = self._peers.stopped()
                how = "is stopped by a signal (SIGSTOP)" if 0 in stopped else "is stopped, or its host is"
                if launcher_has_store():
                    stop_without_store("the launcher's store does not answer", [])
                else:
                    stop_without_store(f"rank 0, which has the store, does not answer: it {how}", stopped)
                return

"""Ranks that wait in different collective calls: each call is compared under its number.

All ranks of a pipeline make the same calls in the same order. A rank that has not moved for three seconds in a call
writes the call under its number into the store. Another rank that has another call under this number proves it::

    rank 0  run_train step 16, save_pretrained        call 17 of the pipeline: "save_pretrained"
    rank 1  run_train step 16, run_train step 17      call 17 of the pipeline: "run_train step 17"

A slow rank makes the same call, so it is never taken for a rank in a different call. Ranks of other pipelines may
evaluate more often. They are compared by their calls of all ranks, and by the training steps before these.
"""

import json
import time
from typing import Any

from nxdpp.ranks.faults.board import Board, Position
from nxdpp.ranks.faults.watch_store import WatchConnection

_UNMOVED_SECONDS = 3.0


class OtherCalls:
    """Comparison of this rank's calls with the calls of the others; one thread uses it.

    A call is compared after ``seconds`` without a move. ``connection`` is to the store of the failure watch.
    """

    def __init__(self, connection: WatchConnection, board: Board, rank: int, seconds: float = _UNMOVED_SECONDS) -> None:
        self._connection = connection
        self._board = board
        self._rank = rank
        self._seconds = seconds
        self._mark: tuple[int, int] = (-1, -1)
        self._since = time.monotonic()
        self._written = 0

    def find(self) -> str | None:
        """The sentence about a rank in another call than this one; ``None`` if none is known.

        Asks the store nothing while this rank moves. Raises ``RuntimeError`` if the store is gone.
        """
        mark = self._board.moves, self._board.action
        now = time.monotonic()
        if mark != self._mark:
            self._mark, self._since = mark, now
        position = self._board.position()
        if not position.call or now - self._since < self._seconds:
            return None
        if self._written != position.begun:
            self._written = position.begun
            return self._compare_once(position)
        return None if position.scope == "world" else self._compare_with_next(position)

    def _compare_once(self, position: Position) -> str | None:
        """Write the call for ranks that come later, and compare it with what others have written."""
        pipeline = min(self._board.members.get("pipeline", {self._rank}))
        found = self._compare(f"calls/{pipeline}/{position.begun}", position)
        if position.scope == "world":
            return found or self._compare(f"calls/world/{position.number}", position)
        return found or self._compare_with_next(position)

    def _compare_with_next(self, position: Position) -> str | None:
        """Compare a training step with the next call of all ranks, if a rank of any pipeline is in it."""
        key = f"calls/world/{self._board.begun['world'] + 1}"
        if not self._connection.check([key]):
            return None
        theirs = json.loads(self._connection.get(key))
        return self._sentence(theirs, position) if theirs["trained"] < self._board.training_steps() else None

    def _compare(self, key: str, position: Position) -> str | None:
        own = {"rank": self._rank, "call": position.call, "trained": self._board.training_steps()}
        first: dict[str, Any] = json.loads(self._connection.compare_set(key, "", json.dumps(own)))
        return None if first["call"] == position.call else self._sentence(first, position)

    def _sentence(self, theirs: dict[str, Any], position: Position) -> str:
        both = sorted([(theirs["rank"], theirs["call"]), (self._rank, position.call)])
        (first, first_call), (second, second_call) = both
        return (
            f"rank {first} is in {first_call}, rank {second} in {second_call}: each waits for the other. Make these "
            f"calls on every rank, in the same order"
        )

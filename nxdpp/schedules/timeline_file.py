"""Timeline files: the recorded steps of a pipeline in the Chrome trace format, which Perfetto opens.

A file is a JSON array with one event a line. It is complete after each step: the next step is written over the closing
bracket. ``pid`` is the pipeline among the replicas, ``tid`` the rank; ``ts`` and ``dur`` are microseconds::

    [
    {"ph": "M", "name": "thread_name", "pid": 0, "tid": 1, "args": {"name": "rank 1"}},
    {"ph": "X", "name": "F s1 mb0", "cat": "compute", "pid": 0, "tid": 1, "ts": ..., "dur": ..., "args": {...}}
    ]
"""

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

_END = b"\n]\n"


class Activity(StrEnum):
    """Kind of an event; the value is its category in the file."""

    STEP = "step"
    COMPUTE = "compute"
    COMPILE = "compile"
    EXCHANGE = "exchange"
    WAIT = "wait"
    SEND = "send"
    RECEIVE = "receive"
    WAIT_SENT = "wait sent"
    WAIT_METADATA = "wait metadata"


class Event(NamedTuple):
    """One activity of a rank from ``start`` to ``end``, in nanoseconds.

    ``kind`` is the letter of a compute action, or of the one for which a graph is compiled; a transfer has ``F`` for
    activations, ``B`` for gradients. ``other`` is the stage at the other end. A send or receive is the call that
    starts the transfer, not the transfer.
    """

    activity: Activity
    kind: str
    stage: int
    microbatch: int | None
    other: int | None
    start: int
    end: int

    @property
    def name(self) -> str:
        """``F s2 mb5``, ``compile F s2 mb5``, ``send F s2 mb5 to s3``, ``wait B s2 mb5 from s3``."""
        words = [
            "" if self.activity in (Activity.COMPUTE, Activity.EXCHANGE) else self.activity.value,
            self.kind,
            f"s{self.stage}",
        ]
        words.append("" if self.microbatch is None else f"mb{self.microbatch}")
        if self.other is not None:
            words.append(f"{'to' if self.activity in (Activity.SEND, Activity.WAIT_SENT) else 'from'} s{self.other}")
        return " ".join(filter(None, words))


def check_path(path: Any) -> Path:
    """Return ``trace_file_path`` as a path.

    Raises ``TypeError`` for another type, ``ValueError`` for a path where no file can be written.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"trace_file_path={path!r:.80} must be the path of a file.")
    found = Path(path)
    if not str(path) or (found.exists() and not found.is_file()):
        raise ValueError(f"trace_file_path={str(path)!r} is a folder, a pipe or a device: give the path of a file.")
    if not found.parent.is_dir():
        raise ValueError(f"trace_file_path={str(path)!r}: there is no folder {found.parent}. Make it on every machine.")
    if not os.access(found if found.exists() else found.parent, os.W_OK):
        raise ValueError(f"trace_file_path={str(path)!r} cannot be written: no permission.")
    return found


class TimelineWriter:
    """Writer of the file of one pipeline, by its number among the replicas.

    The first one writes ``path``; the others write ``NAME.pipeline1.json``, ... next to it.
    """

    def __init__(self, path: Path, pipeline: int, ranks: int) -> None:
        self.path = path if pipeline == 0 else path.with_name(f"{path.stem}.pipeline{pipeline}{path.suffix}")
        self._pipeline = pipeline
        self._ranks = ranks
        self._transfers = count()

    def create(self) -> None:
        """Write a file without steps; an existing file is replaced."""
        row: dict[str, Any] = {"ph": "M", "pid": self._pipeline}
        rows = [row | {"name": "process_name", "args": {"name": f"pipeline {self._pipeline}"}}]
        for rank in range(self._ranks):
            rows.append(row | {"tid": rank, "name": "thread_name", "args": {"name": f"rank {rank}"}})
            rows.append(row | {"tid": rank, "name": "thread_sort_index", "args": {"sort_index": rank}})
        try:
            self.path.write_bytes(b"[\n" + _lines(rows) + _END)
        except OSError as error:
            raise ValueError(f"trace_file_path={str(self.path)!r} cannot be written: {error.strerror}.") from None

    def append(
        self,
        step: int,
        description: str,
        ranks: Mapping[int, Sequence[Event]],
        told: Mapping[int, Mapping[str, Any]] = MappingProxyType({}),
    ) -> None:
        """Add a step: for each of ``ranks`` the event of the step itself, then its other events.

        What is ``told`` by rank are arguments of the step itself.
        """
        each = [(rank, event) for rank, events in ranks.items() for event in events]
        rows = [self._slice(step, description, rank, event) for rank, event in each] + self._arrows(each)
        for row in rows:
            if row.get("cat") == Activity.STEP.value:
                row["args"] |= told.get(row["tid"], {})
        with self.path.open("r+b") as file:
            # A rank whose step fails writes its own events while rank 0 may still write the step before.
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(-len(_END), os.SEEK_END)
            file.write(b",\n" + _lines(rows) + _END)

    def _slice(self, step: int, description: str, rank: int, event: Event) -> dict[str, Any]:
        name = f"step {step}, {description}"
        arguments: dict[str, Any] = {"step": step}
        if event.activity is not Activity.STEP:
            told = {"kind": event.kind, "stage": event.stage, "microbatch": event.microbatch, "other": event.other}
            name = event.name
            arguments |= {key: value for key, value in told.items() if value not in (None, "")}
        row = {"ph": "X", "name": name, "cat": event.activity.value, "pid": self._pipeline, "tid": rank}
        return row | {"ts": event.start / 1000, "dur": (event.end - event.start) / 1000, "args": arguments}

    def _arrows(self, each: Sequence[tuple[int, Event]]) -> list[dict[str, Any]]:
        """Arrows from each send to the wait for it."""
        arrows: list[dict[str, Any]] = []
        sends: dict[Any, tuple[int, int]] = {
            (e.kind, e.stage, e.other, e.microbatch): (rank, e.start) for rank, e in each if e.activity is Activity.SEND
        }
        for rank, wait in each:
            sent = sends.get((wait.kind, wait.other, wait.stage, wait.microbatch))
            if wait.activity is Activity.WAIT and sent is not None:
                arrow = {"name": "transfer", "cat": "transfer", "pid": self._pipeline, "id": next(self._transfers)}
                arrows.append(arrow | {"ph": "s", "tid": sent[0], "ts": sent[1] / 1000})
                # The end of an arrow belongs to the event around it: the last nanosecond of the wait.
                arrows.append(arrow | {"ph": "f", "bp": "e", "tid": rank, "ts": max(wait.start, wait.end - 1) / 1000})
        return arrows


def _lines(rows: Sequence[Mapping[str, Any]]) -> bytes:
    return ",\n".join(map(json.dumps, rows)).encode()

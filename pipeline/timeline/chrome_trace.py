"""The events of a pipeline's ranks as a Chrome trace, which Perfetto and chrome://tracing open.

The file is a whole JSON array, an event a line, at the end of each step; what is added takes the place of its last
line::

    [
    {"ph": "M", "name": "thread_name", "pid": 0, "tid": 1, "args": {"name": "rank 1"}},
    {"ph": "X", "name": "F s1 mb0", "cat": "compute", "pid": 0, "tid": 1, "ts": ..., "dur": ..., "args": {...}}
    ]
"""

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from nxdpp.pipeline.timeline.recorder import Event, What

_END = b"\n]\n"


def check_path(path: Any) -> Path:
    """The path of a trace.

    Raises ``TypeError`` for what is no path, ``ValueError`` where no file can be written there.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"trace_file_path={path!r:.80} must be the path of a file.")
    found = Path(path)
    folder = found.parent
    if not str(path) or found.is_dir():
        raise ValueError(f"trace_file_path={str(path)!r} is a folder: give the path of a file in it.")
    if not folder.is_dir():
        raise ValueError(f"trace_file_path={str(path)!r}: there is no folder {folder}. Make it, on every machine.")
    if not os.access(found if found.exists() else folder, os.W_OK):
        raise ValueError(f"trace_file_path={str(path)!r} cannot be written: no permission.")
    return found


def path_of_pipeline(path: Path, pipeline: int) -> Path:
    """Where the ``pipeline``-th of several replicas writes: the first to ``path``, others beside it."""
    return path if pipeline == 0 else path.with_name(f"{path.stem}.pipeline{pipeline}{path.suffix}")


class ChromeTrace:
    """The file of one pipeline.

    Args:
        path: of the file.
        pipeline: its number among the replicas; the ``pid`` of its events.
        ranks: of the pipeline; a row each, the ``tid`` of its events.
    """

    def __init__(self, path: Path, pipeline: int, ranks: int) -> None:
        self._path = path
        self._pipeline = pipeline
        self._ranks = ranks
        self._flows = count()

    def create(self) -> None:
        """Begin the file; one that is there is replaced."""
        rows: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": self._pipeline, "args": {"name": f"pipeline {self._pipeline}"}}
        ]
        for rank in range(self._ranks):
            row = {"ph": "M", "pid": self._pipeline, "tid": rank}
            rows.append(row | {"name": "thread_name", "args": {"name": f"rank {rank}"}})
            rows.append(row | {"name": "thread_sort_index", "args": {"sort_index": rank}})
        try:
            self._path.write_bytes(b"[\n" + _lines(rows) + _END)
        except OSError as error:
            raise ValueError(f"trace_file_path={str(self._path)!r} cannot be written: {error.strerror}.") from None

    def append(self, step: int, words: str, ranks: Mapping[int, Sequence[Event]]) -> None:
        """Add what each of ``ranks`` did in a step, the step itself as the first event of each.

        ``words`` say what kind of step it was. Times are nanoseconds on one clock.
        """
        events: list[dict[str, Any]] = []
        for rank, (whole, *parts) in ranks.items():
            events.append(self._slice(rank, f"step {step}, {words}", whole.what.value, whole, {"step": step}))
            events += [self._slice(rank, part.name, part.what.value, part, _arguments(step, part)) for part in parts]
        events += self._arrows(ranks)
        with self._path.open("r+b") as file:
            # A rank whose step fails writes its own part, while the first one may still write the step before.
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(-len(_END), os.SEEK_END)
            file.write(b",\n" + _lines(events) + _END)

    def _slice(self, rank: int, name: str, category: str, event: Event, arguments: dict[str, Any]) -> dict[str, Any]:
        at = {"ts": event.start / 1000, "dur": (event.end - event.start) / 1000}
        return {"ph": "X", "name": name, "cat": category, "pid": self._pipeline, "tid": rank, **at, "args": arguments}

    def _arrows(self, ranks: Mapping[int, Sequence[Event]]) -> list[dict[str, Any]]:
        """From each send to the wait for it."""
        sends = {
            (event.kind, event.stage, event.other, event.microbatch): (rank, event)
            for rank, events in ranks.items()
            for event in events
            if event.what is What.SEND
        }
        arrows: list[dict[str, Any]] = []
        for rank, events in ranks.items():
            for wait in events:
                sent = sends.get((wait.kind, wait.other, wait.stage, wait.microbatch))  # type: ignore[arg-type]
                if wait.what is What.WAIT and sent is not None:
                    shared = {"name": "transfer", "cat": "transfer", "pid": self._pipeline, "id": next(self._flows)}
                    # The last moment that is still in the wait.
                    end = max(wait.start, wait.end - 1) / 1000
                    arrows.append({"ph": "s", **shared, "tid": sent[0], "ts": sent[1].start / 1000})
                    arrows.append({"ph": "f", "bp": "e", **shared, "tid": rank, "ts": end})
        return arrows


def _arguments(step: int, event: Event) -> dict[str, Any]:
    parts = {"kind": event.kind, "stage": event.stage, "microbatch": event.microbatch, "other": event.other}
    return {"step": step} | {name: value for name, value in parts.items() if value not in (None, "")}


def _lines(events: Sequence[Mapping[str, Any]]) -> bytes:
    return ",\n".join(map(json.dumps, events)).encode()

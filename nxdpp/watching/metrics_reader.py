"""Reader of the metrics of a run: the files of all ranks, from where it has read before."""

import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from nxdpp.schedules.actions import parse_action
from nxdpp.schedules.simulate import Span

# Steps over which the busy share of a rank is averaged.
RECENT = 20
# What a line says of its rank, and values of a step that have no curve.
_ABOUT = (
    *("rank", "ranks", "stages", "replica", "tensor_rank", "schedule", "host", "device", "done", "steps"),
    *("command", "versions"),
)
_NO_CURVE = ("time", "step", "busy", "bytes")
# Bytes of lines that are read together, and steps whose actions are kept: ranks may be a step apart.
_PART = 1 << 22
_KEPT = 2
# Points that a curve keeps at most, before each two neighbours become one.
MOST_POINTS = 512
# Start of a file, by which it is known again.
_HEAD_BYTES = 64


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < 2**53


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e300


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_routing(value: Any) -> bool:
    is_whole = isinstance(value, dict) and _is_text(value.get("largest"))
    return is_whole and all(_is_number(value.get(name)) for name in ("largest_over_mean", "share"))


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


# What the values of a line must be that it has by these names.
_SOUND: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("step", "done", "rank", "replica", "tensor_rank"), _is_count),
    "ranks": lambda value: _is_count(value) and value > 0,
    **dict.fromkeys(("time", "seconds", "busy", "bytes"), _is_number),
    **dict.fromkeys(("fault", "schedule", "host", "device", "command"), _is_text),
    "versions": lambda value: isinstance(value, dict) and all(map(_is_text, value.values())),
    "stages": _are_counts,
    "routing": _is_routing,
    "steps": lambda value: value is None or _is_count(value),
}


class Curve:
    """Values by step; of more than ``MOST_POINTS`` the means over 2, 4, 8, ... neighbouring steps, and the last one."""

    def __init__(self) -> None:
        self._bits = 0
        # By the number of a point: its last step, the sum of its values, and their number.
        self._points: dict[int, tuple[int, float, int]] = {}
        self._last = (0, 0.0)

    def add(self, step: int, value: float) -> None:
        """Add the value of ``step``; a later one replaces it, or joins its mean."""
        self._last = step, value
        self._join(step, value, 1)
        if len(self._points) > MOST_POINTS:
            points = sorted(self._points.values())
            self._bits += 1
            self._points = {}
            for point in points:
                self._join(*point)

    def forget_after(self, done: int) -> None:
        """Leave out the values of steps after ``done``; the point that has ``done`` remains."""
        self._points = {key: point for key, point in self._points.items() if key <= done >> self._bits}
        if self._points and self._last[0] > done:
            step, total, count = self._points[max(self._points)]
            self._last = min(step, done), total / count

    def points(self) -> list[tuple[int, float]]:
        """Return the last step and the mean value of each point, in the order of steps; at the end the last value."""
        found = [(step, total / count) for step, total, count in sorted(self._points.values())]
        return [*found[:-1], self._last] if found and found[-1][0] <= self._last[0] else found

    def _join(self, step: int, total: float, count: int) -> None:
        earlier = self._points.get(step >> self._bits) if self._bits else None
        if earlier is not None:
            step, total, count = max(step, earlier[0]), total + earlier[1], count + earlier[2]
        self._points[step >> self._bits] = step, total, count


class RankMetrics:
    """The last start of one rank, as its file has it.

    Attributes:
        about: rank, ranks, stages, replica, schedule, host, device, done, steps, command and versions.
        began_at, seen_at: times of the start and of the last line, in seconds since 1970.
        last: the values of the last step by name.
        busy: the busy shares of the last steps.
        curves: values by name: of rank 0 all, of other ranks the loss.
        actions: compute actions by step, of the last steps that have them; seconds since 1970.
        fault: the sentence with which the rank ended.
        ends: whether the last line says that the run ended without an error.
        left: the error with which the program left the run, if the last line says so; it may have caught the error.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self._path = path
        self._rank = rank
        self._forget()

    def _forget(self) -> None:
        self._offset = 0
        self._head = b""
        self.about: dict[str, Any] = {}
        self.curves: dict[str, Curve] = {}
        self.began_at = self.seen_at = 0.0
        self._begin(0)

    def _begin(self, done: int) -> None:
        """Forget what an earlier start did after step ``done``."""
        self.fault: str | None = None
        self.ends = False
        self.left: str | None = None
        self.last: dict[str, Any] = {}
        self.busy: deque[float] = deque(maxlen=RECENT)
        self.actions: dict[int, list[Span]] = {}
        for curve in self.curves.values():
            curve.forget_after(done)

    def read_on(self) -> None:
        """Read the lines that were appended since the last call, or all of a file that was made anew.

        A line whose end is not written yet waits for the next call. Lines that are no JSON of a ``MetricsFile`` are
        skipped. A file that was removed changes nothing.
        """
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            # A new file may have the inode of a removed one. Its first line has a different time.
            if file.read(len(self._head)) != self._head or os.fstat(file.fileno()).st_size < self._offset:
                self._forget()
            file.seek(self._offset)
            while part := file.readlines(_PART):
                for line in part:
                    if line.endswith(b"\n"):
                        self._offset += len(line)
                        self._head = (self._head + line)[:_HEAD_BYTES]
                        self._add(line)

    def _add(self, line: bytes) -> None:
        # Bytes that are no JSON, and numbers and brackets that are too many for Python.
        with suppress(ValueError, RecursionError):
            found = json.loads(line)
            is_sound = isinstance(found, dict) and "time" in found and ("begins" not in found or "done" in found)
            if is_sound and all(check(found[name]) for name, check in _SOUND.items() if name in found):
                self.seen_at = float(found["time"])
                self._apply(found)

    def _apply(self, found: dict[str, Any]) -> None:
        if "stages" in found:
            self.about |= {key: value for key, value in found.items() if key in _ABOUT}
        if "begins" in found:
            self.began_at = self.seen_at
            self._begin(found["done"])
        if "step" in found:
            self._add_step(found)
        self.fault = self.fault or found.get("fault")
        ends = found.get("ends")
        self.ends, self.left = ends is True, ends if isinstance(ends, str) else None

    def _add_step(self, found: dict[str, Any]) -> None:
        step = found["step"]
        values = {key: value for key, value in found.items() if key not in _ABOUT and key != "actions"}
        # A step may have several lines.
        self.last = (self.last if step == self.last.get("step") else {}) | values
        if "busy" in found:
            self.busy.append(found["busy"])
        for name, value in values.items():
            if name not in _NO_CURVE and (self._rank == 0 or name == "loss"):
                # A text that is no number, a list, or an integer beyond float is no point of a curve.
                with suppress(ValueError, TypeError, OverflowError):
                    number = float(value)
                    self.curves.setdefault(name, Curve()).add(step, number)
        if found.get("actions"):
            with suppress(ValueError, TypeError, OverflowError):
                self.actions[step] = _spans(found["actions"])
                self.actions = dict(list(self.actions.items())[-_KEPT:])


def _spans(actions: Any) -> list[Span]:
    """Return the spans of a line; ``ValueError`` or ``TypeError`` for what are none."""
    spans = [Span(parse_action(text), float(at), float(at) + float(took)) for text, at, took in actions]
    if not all(math.isfinite(span.start) and math.isfinite(span.end) for span in spans):
        raise ValueError("times of actions are finite")
    return spans


class RunMetrics:
    """The metrics in ``folder``, read at once; ``ValueError`` for a folder without them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ranks: dict[int, RankMetrics] = {}
        self.read_on()
        if 0 not in self._ranks:
            raise ValueError(
                f"{folder} has no metrics/rank0000.jsonl. A training writes it: nxdpp.MetricsFile({str(folder)!r}, "
                f"model), or MetricsCallback of nxdpp.integrations."
            )

    def read_on(self) -> None:
        """Read what all ranks have written since the last call."""
        for path in (self.folder / "metrics").glob("rank*.jsonl"):
            number = path.stem.removeprefix("rank")
            if number.isdecimal():
                self._ranks.setdefault(int(number), RankMetrics(path, int(number))).read_on()

    @property
    def ranks(self) -> dict[int, RankMetrics]:
        """The ranks of the last start by number. Files of an earlier start with more ranks are left out."""
        number = self._ranks[0].about.get("ranks", 1)
        return {rank: self._ranks[rank] for rank in sorted(self._ranks) if rank < number}

    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """Step and value of each curve by name: loss, tokens a second, seconds, and the names of the program.

        The loss is rank 0's, or the mean over the ranks that have one.
        """
        found = {name: curve.points() for name, curve in self._ranks[0].curves.items()}
        tokens, seconds = dict(found.pop("tokens", [])), dict(found.get("seconds", []))
        first = {
            "loss": found.pop("loss", None) or list(self._mean_losses()),
            "tokens a second": [(step, count / seconds[step]) for step, count in tokens.items() if seconds.get(step)],
        }
        return {name: curve for name, curve in (first | found).items() if curve}

    def _mean_losses(self) -> Iterator[tuple[int, float]]:
        curves = [dict(rank.curves["loss"].points()) for rank in self.ranks.values() if "loss" in rank.curves]
        for step in sorted(set().union(*curves)):
            losses = [curve[step] for curve in curves if step in curve]
            yield step, sum(losses) / len(losses)

"""Reader of the metrics of a run: the files of all ranks, from where it has read before."""

import json
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from nxdpp.schedules.actions import parse_action
from nxdpp.schedules.simulate import Span

# Steps over which the busy share of a rank is averaged.
RECENT = 20
# What a line says of its rank, and values of a step that have no curve.
_ABOUT = ("rank", "ranks", "stages", "replica", "schedule", "host", "device", "done", "steps")
_NO_CURVE = ("time", "step", "busy", "bytes")
# Bytes of lines that are read together, and steps whose actions are kept: ranks may be a step apart.
_PART = 1 << 22
_KEPT = 2


class RankMetrics:
    """What the file of one rank says of its last start.

    Attributes:
        about: rank, ranks, stages, replica, schedule, host, device, done and steps.
        began_at, seen_at: times of the start and of the last line, in seconds since 1970.
        last: the values of the last step by name.
        busy: the busy shares of the last steps.
        curves: values by name and step: of rank 0 all, of other ranks the loss.
        actions: compute actions by step, of the last steps that have them; seconds since 1970.
        fault: the sentence with which the rank ended.
        ends: whether the last line is that of a run that ended well.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self._path = path
        self._rank = rank
        self._offset = 0
        self.about: dict[str, Any] = {}
        self.curves: dict[str, dict[int, float]] = {}
        self.began_at = self.seen_at = 0.0
        self._begin(0)

    def _begin(self, done: int) -> None:
        """Forget what an earlier start did after step ``done``."""
        self.fault: str | None = None
        self.ends = False
        self.last: dict[str, Any] = {}
        self.busy: deque[float] = deque(maxlen=RECENT)
        self.actions: dict[int, list[Span]] = {}
        for curve in self.curves.values():
            for step in [step for step in curve if step > done]:
                del curve[step]

    def read_on(self) -> None:
        """Read the lines since the last call. A line without its end waits; a torn or strange one is left out."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            while part := file.readlines(_PART):
                for line in part:
                    if line.endswith(b"\n"):
                        self._offset += len(line)
                        self._add(line)

    def _add(self, line: bytes) -> None:
        # A line that is none of MetricsFile raises in one way or another.
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            found = json.loads(line)
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
        self.ends = "ends" in found

    def _add_step(self, found: dict[str, Any]) -> None:
        step = found["step"]
        values = {key: value for key, value in found.items() if key not in _ABOUT and key != "actions"}
        # A step may have several lines.
        self.last = (self.last if step == self.last.get("step") else {}) | values
        if "busy" in found:
            self.busy.append(found["busy"])
        for name, value in values.items():
            if isinstance(value, int | float | str) and name not in _NO_CURVE and (self._rank == 0 or name == "loss"):
                self.curves.setdefault(name, {})[step] = float(value)
        if found.get("actions"):
            self.actions[step] = [Span(parse_action(text), at, at + took) for text, at, took in found["actions"]]
            self.actions = dict(list(self.actions.items())[-_KEPT:])


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
        """The ranks of the last start by number, without those of an earlier start with more ranks."""
        number = self._ranks[0].about.get("ranks", 1)
        return {rank: self._ranks[rank] for rank in sorted(self._ranks) if rank < number}

    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """Step and value of each curve by name: loss, tokens a second, seconds, and the names of the program.

        The loss is rank 0's, or the mean over the ranks that have one.
        """
        found = {name: sorted(curve.items()) for name, curve in self._ranks[0].curves.items()}
        tokens, seconds = dict(found.pop("tokens", [])), dict(found.get("seconds", []))
        first = {
            "loss": found.pop("loss", None) or list(self._mean_losses()),
            "tokens a second": [(step, count / seconds[step]) for step, count in tokens.items() if seconds.get(step)],
        }
        return {name: curve for name, curve in (first | found).items() if curve}

    def _mean_losses(self) -> Iterator[tuple[int, float]]:
        curves = [rank.curves["loss"] for rank in self.ranks.values() if "loss" in rank.curves]
        for step in sorted(set().union(*curves)):
            yield step, fmean(curve[step] for curve in curves if step in curve)

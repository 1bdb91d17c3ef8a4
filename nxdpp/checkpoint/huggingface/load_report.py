"""Report of a load: tensors of the files that were left out, and tensors of the model that have initial weights."""

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from nxdpp.checkpoint.files.layout import printable
from nxdpp.ranks import parallel_state

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")
_LONGEST_NAME = 300


class OtherShape(NamedTuple):
    """A tensor that has different shapes in the checkpoint and in the model."""

    name: str
    stored: tuple[int, ...]
    expected: tuple[int, ...]

    def __str__(self) -> str:
        shapes = f"{list(self.stored)} in the checkpoint, {list(self.expected)} in the model"
        return f"{printable(self.name, _LONGEST_NAME)} ({shapes})"


@dataclass(frozen=True)
class LoadReport:
    """Differences between a checkpoint and the whole model that it was loaded into; equal on all ranks.

    It is true if there is any difference.

    Attributes:
        missing: names of the model's tensors that the checkpoint lacks. They have initial weights.
        unexpected: names of the files' tensors that the model lacks. They were left out.
        mismatched: tensors of a different shape. The model's have initial weights.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[OtherShape, ...] = ()

    @property
    def initialised(self) -> tuple[str, ...]:
        """Names of the model's tensors that have initial weights."""
        return (*self.missing, *(each.name for each in self.mismatched))

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        """A line for each kind; names that differ in a layer's number are one, with ``*`` and their count."""
        lines = {
            "missing, with initial weights": list(_grouped(self.missing)),
            "unexpected, left out": list(_grouped(self.unexpected)),
            "of another shape, with initial weights": list(map(str, self.mismatched)),
        }
        counts = (len(self.missing), len(self.unexpected), len(self.mismatched))
        return "\n".join(
            f"  {count} {kind}: {', '.join(names)}"
            for count, (kind, names) in zip(counts, lines.items(), strict=True)
            if count
        )


def print_once(report: LoadReport, source: object, kind: str) -> None:
    """Print ``report`` about ``source`` and a model of class ``kind`` on the first rank of the job, unless empty."""
    places = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    if report and not any(places):
        print(f"{source} has other tensors than this {kind}:\n{report}", file=sys.stderr, flush=True)


def _grouped(names: Iterable[str]) -> Iterable[str]:
    counts: dict[str, list[str]] = {}
    for name in names:
        counts.setdefault(_NUMBER.sub("*", name), []).append(name)
    for pattern, members in counts.items():
        shown = printable(members[0] if len(members) == 1 else pattern, _LONGEST_NAME)
        yield shown if len(members) == 1 else f"{shown} ({len(members)})"

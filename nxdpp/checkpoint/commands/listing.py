"""Printed form of what a path has: a title, lines, and a table of tensors; or all of it as JSON."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from rich.console import Console

from nxdpp.checkpoint.files.pieces import StoredLayout, printable
from nxdpp.counted import counted
from nxdpp.schedules.view.tables import tables

_UNITS = ("B", "KiB", "MiB", "GiB")
_LONGEST = 1000


@dataclass
class Listing:
    """Content of a path.

    Attributes:
        format: ``nxdpp``, ``huggingface``, ``nxd`` or ``dcp``.
        path: of the checkpoint.
        title: the first line, after the path.
        lines: name and text of each further line.
        tensors: shape and dtype by name.
        bytes: size of each row of the table, where it differs from the tensor's size.
        bytes_title: heading of these sizes.
        rest: the last line.
        values: further content for JSON.
    """

    format: str
    path: str
    title: str
    lines: list[tuple[str, str]]
    tensors: Mapping[str, StoredLayout]
    bytes: Mapping[str, int] = field(default_factory=dict)
    bytes_title: str = "bytes"
    rest: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)

    def print(self) -> None:
        """Print it for a reader. Names are folded at the width of the terminal, and nothing is cut."""
        out = Console(highlight=False, markup=False, emoji=False)
        out.print(f"{self.path}: {self.title}", soft_wrap=True)
        for name, text in [*self._summary(), *self.lines]:
            out.print(f"{printable(name):<13} {printable(text, _LONGEST)}", soft_wrap=True)
        heads = ("tensor", "dtype", "shape", self.bytes_title)
        if self.tensors:
            out.print(*tables(heads, [self._row(name) for name in self.tensors], out.width, left=3, folded=0))
        if self.rest:
            out.print(self.rest)

    def _summary(self) -> list[tuple[str, str]]:
        """Number, dtypes and sizes of all tensors of the table, before the lines of each."""
        if not self.tensors:
            return []
        tensors = self.tensors.values()
        count = sum(prod(each.shape) for each in tensors)
        dtypes = ", ".join(dict.fromkeys(_dtype(each) for each in tensors))
        size, state = sum(each.bytes for each in tensors), sum(self.bytes.values())
        more = f"; {sized(state)} {self.bytes_title}" if state > size else ""
        return [("values", f"{count:,} in {counted(len(self.tensors), 'tensor')}, {dtypes}, {sized(size)}{more}")]

    def _row(self, name: str) -> tuple[str, str, str, str]:
        layout = self.tensors[name]
        size = sized(self.bytes.get(name, layout.bytes))
        return printable(name, _LONGEST), _dtype(layout), str(list(layout.shape)), size

    def as_json(self) -> str:
        """Return one JSON object, with the names as they are, and sizes in bytes."""
        tensors = {
            name: {"dtype": _dtype(layout), "shape": list(layout.shape), "bytes": layout.bytes}
            for name, layout in self.tensors.items()
        }
        found = {"format": self.format, "path": self.path, **self.values, "tensors": tensors}
        return json.dumps(found, indent=2, allow_nan=False)


def sized(count: float) -> str:
    """``count`` bytes in the largest unit that fits."""
    for unit in _UNITS:
        if count < 1024 or unit == _UNITS[-1]:
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"


def _dtype(layout: StoredLayout) -> str:
    return str(layout.dtype).removeprefix("torch.")

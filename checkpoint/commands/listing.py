"""Printed form of what a path has: a title, lines, and a table of tensors; or all of it as JSON."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from nxdpp.checkpoint.files.layout import Layout
from nxdpp.checkpoint.files.printable import printable

_UNITS = ("B", "KiB", "MiB", "GiB")
_LONGEST = 1000


@dataclass
class Listing:
    """Content of a path.

    Attributes:
        format: ``nxdpp``, ``huggingface`` or ``nxd``.
        path: of the checkpoint.
        title: the first line, after the path.
        lines: name and text of each further line.
        tensors: shape and dtype by name.
        bytes: size of each row of the table, where it is not that of the tensor.
        bytes_title: heading of these sizes.
        rest: the last line.
        values: further content for JSON.
    """

    format: str
    path: str
    title: str
    lines: list[tuple[str, str]]
    tensors: Mapping[str, Layout]
    bytes: Mapping[str, int] = field(default_factory=dict)
    bytes_title: str = "bytes"
    rest: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)

    def print(self) -> None:
        """Print it for a reader. Names are folded at the width of the terminal, and nothing is cut."""
        out = Console(highlight=False, markup=False, emoji=False)
        out.print(f"{self.path}: {self.title}", soft_wrap=True)
        for name, text in self.lines:
            out.print(f"{printable(name):<13} {printable(text, _LONGEST)}", soft_wrap=True)
        table = Table("tensor", box=None, padding=(0, 2, 0, 0))
        table.columns[0].overflow = "fold"
        table.add_column("dtype", no_wrap=True)
        table.add_column("shape", no_wrap=True)
        table.add_column(self.bytes_title, justify="right", no_wrap=True)
        for name, layout in self.tensors.items():
            size = sized(self.bytes.get(name, layout.bytes))
            table.add_row(printable(name, _LONGEST), _dtype(layout), str(list(layout.shape)), size)
        out.print(table)
        if self.rest:
            out.print(self.rest)

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


def _dtype(layout: Layout) -> str:
    return str(layout.dtype).removeprefix("torch.")

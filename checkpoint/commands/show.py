"""``python -m nxdpp checkpoint show``: what a checkpoint has, in lines and a table."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from nxdpp.checkpoint.distributed.document import OF_MODEL, OF_OPTIMIZER, Document, number_of, tensors_of

_UNITS = ("B", "KiB", "MiB", "GiB")


def show(folder: Path, document: Document) -> None:
    """Print layout, content and tensors of the checkpoint in ``folder``."""
    out = Console(highlight=False)
    content, tensors = document.content, tensors_of(document.metadata)
    spans = document.metadata.storage_data
    files = {span.file for span in spans.values()}
    size = sum(map(_bytes_of, tensors.values()))
    held = f"{len(tensors):,} tensors, {len(spans):,} blocks, {len(files):,} files, {_bytes(size)}"
    out.print(f"{folder}: checkpoint {number_of(folder)}, {held}", soft_wrap=True, markup=False)
    for name, text in _lines(content):
        out.print(f"{name:<13} {text}", soft_wrap=True, markup=False)
    out.print(_table(tensors))
    others = [tensor for name, tensor in tensors.items() if not name.startswith((OF_MODEL, OF_OPTIMIZER))]
    if others:
        out.print(
            f"And {len(others):,} tensors of generators, schedulers and user content, "
            f"{_bytes(sum(map(_bytes_of, others)))}."
        )


def _lines(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    layout = content["layout"]
    if layout is None:
        saved = "converted, by no rank"
    else:
        world = " x ".join(f"{layout[name]} {name}" for name in ("tensor", "pipeline", "data"))
        saved = f"{world}, {layout['ranks']} ranks"
    lines = [("saved by", saved)]
    configuration = content.get("configuration") or {}
    if "config.json" in configuration:
        classes = json.loads(configuration["config.json"]).get("architectures")
        lines.append(("model", ", ".join(classes or ["of transformers"])))
    for name, first in (content["ties"] or {}).items():
        lines.append(("tied", f"{name} is {first}"))
    optimizer = content["optimizer"]
    if optimizer is not None:
        keys = ", ".join(sorted({key for state in optimizer["states"].values() for key in state}))
        lines.append(("optimizer", f"{optimizer['class']} with {keys or 'no state'}"))
        for number, group in enumerate(optimizer["groups"]):
            lines.append((f"  group {number}", f"{len(group['names'])} parameters, {_json(group['options'])}"))
    for name in ("scheduler", "grad_scaler", "user_content"):
        if content[name] is not None:
            lines.append((name, _json(content[name])))
    return lines


def _table(tensors: Mapping[str, TensorStorageMetadata]) -> Table:
    """A row for each tensor of the model, with the bytes of its optimizer state."""
    table = Table("tensor of the model", "dtype", "shape", box=None, padding=(0, 2, 0, 0))
    table.columns[0].overflow = "fold"
    table.add_column("with state", justify="right")
    sizes: Counter[str] = Counter()
    for name, tensor in tensors.items():
        if name.startswith(OF_OPTIMIZER):
            sizes[name.removeprefix(OF_OPTIMIZER).rpartition(".")[0]] += _bytes_of(tensor)
    for full, tensor in tensors.items():
        if not full.startswith(OF_MODEL):
            continue
        name = full.removeprefix(OF_MODEL)
        dtype = str(tensor.properties.dtype).removeprefix("torch.")
        table.add_row(name, dtype, str(list(tensor.size)), _bytes(_bytes_of(tensor) + sizes[name]))
    return table


def _bytes_of(tensor: TensorStorageMetadata) -> int:
    return tensor.size.numel() * tensor.properties.dtype.itemsize


def _bytes(count: float) -> str:
    for unit in _UNITS:
        if count < 1024 or unit == _UNITS[-1]:
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False)

"""``python -m nxdpp checkpoint show``: what a checkpoint has, in lines and a table."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nxdpp.checkpoint.commands.formats import format_of, opened, unfinished
from nxdpp.checkpoint.commands.listing import Listing, sized
from nxdpp.checkpoint.distributed import directory
from nxdpp.checkpoint.distributed.directory import DOCUMENT, number_of
from nxdpp.checkpoint.distributed.document import OF_MODEL, OF_OPTIMIZER, Document

_STEPS = ("step", "global_step", "total_steps")


def show(path: Path, as_json: bool) -> None:
    """Print what ``path`` has: layout, content and tensors of a checkpoint, or files of a different format.

    Raises ``ValueError`` for a path without a checkpoint, and ``DamagedFile`` for a damaged or unfinished one.
    """
    kind = format_of(path)
    if kind == "nxdpp":
        found = _listing(path, *opened(path))
    else:
        # transformers takes seconds to import.
        from nxdpp.checkpoint.commands.other_formats import show_huggingface, show_ranks

        found = (show_huggingface if kind == "huggingface" else show_ranks)(path)
    if as_json:
        print(found.as_json())
    else:
        found.print()


def _listing(path: Path, folder: Path, document: Document) -> Listing:
    content, spans = document.content, document.metadata.storage_data
    tensors = document.layouts()
    files = {span.file for span in spans.values()}
    size = sized(sum(each.bytes for each in tensors.values()))
    held = f"{len(tensors):,} tensors, {len(spans):,} blocks, {len(files):,} files, {size}"
    state: Counter[str] = Counter()
    for name, each in tensors.items():
        if name.startswith(OF_OPTIMIZER):
            state[name.removeprefix(OF_OPTIMIZER).rpartition(".")[0]] += each.bytes
    of_model = document.layouts(OF_MODEL)
    others = [each.bytes for name, each in tensors.items() if not name.startswith((OF_MODEL, OF_OPTIMIZER))]
    rest = f"And {len(others):,} tensors of generators, schedulers and user content, {sized(sum(others))}."
    checkpoints = _checkpoints(path) if folder != path else []
    values = {
        "number": number_of(folder),
        "step": _step(content["user_content"]),
        "checkpoints": [name for name, _ in checkpoints] or [folder.name],
        **{key: value for key, value in content.items() if key != "random"},
        "all_tensors": len(tensors),
        "all_bytes": sum(each.bytes for each in tensors.values()),
    }
    return Listing(
        "nxdpp",
        str(folder),
        f"checkpoint {number_of(folder)}, {held}",
        [*_listed(checkpoints), *_lines(content)],
        of_model,
        {name: each.bytes + state[name] for name, each in of_model.items()},
        "with state",
        rest if others else "",
        values,
    )


def _checkpoints(path: Path) -> list[tuple[str, str]]:
    """The checkpoints of a training, the newest first, and its unfinished ones: tags and texts."""
    found = []
    for place, tag in enumerate(directory.tags(path)):
        size = sum(file.stat().st_size for file in (path / tag).iterdir() if file.is_file())
        newest = ", the newest, shown below" if place == 0 else ""
        found.append((tag, f"checkpoint {number_of(path / tag)}, {sized(size)} on the disk{newest}"))
    return [*found, *((folder.name, f"unfinished: {DOCUMENT} is missing") for folder in unfinished(path))]


def _listed(checkpoints: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return checkpoints if len(checkpoints) > 1 else []


def _lines(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    layout = content["layout"]
    if layout is None:
        saved = "converted, by no rank"
    else:
        world = " x ".join(f"{layout[name]} {name}" for name in ("tensor", "pipeline", "data"))
        saved = f"{world}, {layout['ranks']} ranks"
    lines = [("saved by", saved)]
    step = _step(content["user_content"])
    if step is not None:
        lines.insert(0, ("step", f"{step:,}"))
    configuration = content.get("configuration") or {}
    if "config.json" in configuration:
        settings = json.loads(configuration["config.json"])
        classes = settings.get("architectures") if isinstance(settings, dict) else None
        lines.append(("model", ", ".join(map(str, classes)) if isinstance(classes, list) else "of transformers"))
    for name, first in (content["ties"] or {}).items():
        lines.append(("tied", f"{name} is {first}"))
    optimizer = content["optimizer"]
    if optimizer is not None:
        keys = ", ".join(sorted({key for state in optimizer["states"].values() for key in state}))
        lines.append(("optimizer", f"{optimizer['class']} with {keys or 'no state'}"))
        for number, group in enumerate(optimizer["groups"]):
            # Options that are off are in --json.
            options = {key: each for key, each in group["options"].items() if each is not None and each is not False}
            lines.append((f"  group {number}", f"{len(group['names'])} parameters, {_json(options)}"))
    for name in ("scheduler", "grad_scaler", "user_content"):
        if content[name] is not None:
            lines.append((name, _json(content[name])))
    return lines


def _step(user_content: Any) -> int | None:
    """The step that the user's content names."""
    if isinstance(user_content, dict):
        for name in _STEPS:
            if type(user_content.get(name)) is int:
                return int(user_content[name])
    return None


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False)

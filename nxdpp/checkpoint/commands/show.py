"""``python -m nxdpp checkpoint show`` and ``verify``: what a checkpoint has, and whether its bytes are as written."""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from nxdpp.checkpoint.commands.formats import format_of, opened, unfinished
from nxdpp.checkpoint.commands.listing import Listing, sized
from nxdpp.checkpoint.dcp.directory import read_dcp_directory
from nxdpp.checkpoint.distributed import directory
from nxdpp.checkpoint.distributed.directory import DOCUMENT, SUFFIX, number_of
from nxdpp.checkpoint.distributed.document import OF_MODEL, OF_OPTIMIZER, Document, tensors_of
from nxdpp.checkpoint.files.checksummed_reader import ChecksummedReader, DamagedFile
from nxdpp.checkpoint.files.pieces import layouts_of, listed, printable
from nxdpp.checkpoint.files.rank_file import KEY, RankFile, rank_files
from nxdpp.checkpoint.huggingface.read_directory import method_of, read_contents
from nxdpp.counted import counted
from nxdpp.tensor.rank_files import rank_name

_NO_CHECKSUMS = "Such files have no checksums of values, so changed values are not found."
_STEPS = ("step", "global_step", "total_steps")


def show(path: Path, as_json: bool) -> None:
    """Print what ``path`` has: layout, content and tensors of a checkpoint, or files of a different format.

    Raises ``ValueError`` for a path without a checkpoint, and ``DamagedFile`` for a damaged or unfinished one.
    """
    kind = format_of(path)
    found = _listing(path, *opened(path)) if kind == "nxdpp" else _OTHERS[kind](path)
    if as_json:
        print(found.as_json())
    else:
        found.print()


def verify(path: Path, every: bool = False) -> int:
    """Print each damaged tensor of the checkpoint with its file, and the result; return 1 for a damaged one.

    Files in other formats have no checksums: their headers and lengths are compared. ``every`` is for all checkpoints
    of a training, not only the newest.

    Raises ``ValueError`` for a path without a checkpoint, and for ``every`` unless the path is a training's.
    """
    try:
        kind = format_of(path)
    except DamagedFile as error:
        print(error)
        return 1
    tags = directory.tags(path)
    if every and (kind != "nxdpp" or not tags or (path / DOCUMENT).is_file()):
        raise ValueError(f"{path} is not the directory of a training's checkpoints: leave --all out.")
    if every:
        return max(_verify(path / tag) for tag in tags)
    if kind == "nxdpp":
        return _verify(path)
    return _verify_files(path, partial(_dcp, headers=True) if kind == "dcp" else _OTHERS[kind])


def _verify(path: Path) -> int:
    try:
        folder, document = opened(path)
    except DamagedFile as error:
        print(error)
        return 1
    spans = document.metadata.storage_data
    order = sorted(spans, key=lambda index: (spans[index].file, spans[index].start))
    damaged: dict[str, None] = {}
    names: defaultdict[str, dict[str, None]] = defaultdict(dict)
    with ChecksummedReader(folder) as reader:
        for index in order:
            names[spans[index].file][index.fqn] = None
            try:
                reader.verify(spans[index])
            except (DamagedFile, OSError) as error:
                damaged[index.fqn] = None
                print(f"{printable(index.fqn, 300)}: {error}")
        for file, (length, header) in document.headers().items():
            try:
                reader.verify_header(file, length, header)
            except (DamagedFile, OSError) as error:
                if not names[file].keys() <= damaged.keys():
                    print(error)
                damaged |= names[file]
    tensors = tensors_of(document.metadata)
    files = len(names)
    size = sum(span.length for span in spans.values())
    held = f"{counted(len(tensors), 'tensor')} in {counted(files, 'file')}, {size:,} bytes"
    if damaged:
        print(f"{folder} is damaged: {len(damaged):,} of {held}.")
        return 1
    try:
        if any(file.endswith(SUFFIX) for file in names):
            _dcp(folder, headers=True)
    except (DamagedFile, OSError) as error:
        print(error)
        print(f"{folder} is damaged for torch.distributed.checkpoint, and load_checkpoint reads it: {held}.")
        return 1
    print(f"{folder} is whole: {held}.")
    return 0


def _listing(path: Path, folder: Path, document: Document) -> Listing:
    content, spans = document.content, document.metadata.storage_data
    tensors = document.layouts()
    files = {span.file for span in spans.values()}
    size = sized(sum(each.bytes for each in tensors.values()))
    held = f"{counted(len(tensors), 'tensor')}, {counted(len(spans), 'block')}, {counted(len(files), 'file')}, {size}"
    state: Counter[str] = Counter()
    for name, each in tensors.items():
        if name.startswith(OF_OPTIMIZER):
            state[name.removeprefix(OF_OPTIMIZER).rpartition(".")[0]] += each.bytes
    of_model = document.layouts(OF_MODEL)
    others = [each.bytes for name, each in tensors.items() if not name.startswith((OF_MODEL, OF_OPTIMIZER))]
    rest = f"And {counted(len(others), 'tensor')} of generators, schedulers and user content, {sized(sum(others))}."
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
        [*(checkpoints if len(checkpoints) > 1 else []), *_lines(content)],
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


def _lines(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    layout = content["layout"]
    if layout is None:
        saved = "converted, by no rank"
    else:
        world = " x ".join(f"{layout[name]} {name}" for name in ("tensor", "pipeline", "data"))
        saved = f"{world}, {counted(layout['ranks'], 'rank')}"
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
            lines.append((f"  group {number}", f"{counted(len(group['names']), 'parameter')}, {_json(options)}"))
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


def _huggingface(path: Path) -> Listing:
    """Return the content of a Hugging Face directory. Raises ``ValueError`` for a damaged one."""
    contents = read_contents(path)
    if contents.adapter is not None and contents.lacks_weights:
        raise ValueError(f"{path} has the configuration of an adapter, and {contents.adapter} is missing.")
    stored, settings = contents.tensors, contents.settings
    layouts = layouts_of(stored)
    files = len({each.path for each in stored.values()})
    size = sum(each.bytes for each in layouts.values())
    classes = settings.get("architectures") or settings.get("model_type") or "unknown, without config.json"
    named = ", ".join(map(str, classes)) if isinstance(classes, list) else str(classes)
    lines = [("model", named if contents.adapter is None else "adapter")]
    quantised = method_of(settings)
    if quantised is not None:
        lines.append(("quantised", quantised))
    held = f"{counted(len(layouts), 'tensor')}, {counted(files, 'file')}, {sized(size)}"
    values = {"model": lines[0][1], "quantised": quantised, "all_tensors": len(layouts), "all_bytes": size}
    return Listing("huggingface", str(path), f"Hugging Face directory, {held}", lines, layouts, values=values)


def _ranks(path: Path) -> Listing:
    """Return the tensors of tensor rank 0 on each stage. Raises ``ValueError`` for damaged files."""
    files = {place: RankFile(file, KEY) for place, file in rank_files(path).items()}
    tensor, pipeline = (max(place[at] for place in files) + 1 for at in (0, 1))
    layouts = {name: layout for stage in range(pipeline) for name, layout in files[0, stage].layouts.items()}
    size = sum(layout.bytes for file in files.values() for layout in file.layouts.values())
    lines = [(rank_name(*place), counted(len(file.layouts), "tensor")) for place, file in sorted(files.items())]
    held = f"{tensor} tensor x {pipeline} pipeline, {counted(len(files), 'file')}, {sized(size)}"
    values = {"layout": {"tensor": tensor, "pipeline": pipeline}, "all_bytes": size}
    title = f"files of NeuronX Distributed's ranks, {held}. Shapes are those of tensor rank 0"
    return Listing("nxd", str(path), title, lines, layouts, values=values)


def _dcp(path: Path, headers: bool = False) -> Listing:
    """Return the tensors by name. Raises ``ValueError`` for damaged files, with ``headers`` for damaged pieces too."""
    directory = read_dcp_directory(path)
    if headers:
        for tensor in directory.tensors.values():
            tensor.check_headers()
    layouts, others = layouts_of(directory.tensors), list(directory.others)
    pieces = [piece for tensor in directory.tensors.values() for piece in tensor.pieces]
    size = sum(each.bytes for each in layouts.values())
    files = len({piece.path for piece in pieces})
    held = ", ".join(
        [counted(len(layouts), "tensor"), counted(len(pieces), "block"), counted(files, "file"), sized(size)]
    )
    entries = counted(len(others), "entry that is no tensor", "entries that are not tensors")
    rest = f"And {entries}: {listed(others)}." if others else ""
    values = {"others": others, "all_tensors": len(layouts), "all_bytes": size}
    return Listing("dcp", str(path), f"torch.distributed.checkpoint, {held}", [], layouts, rest=rest, values=values)


def _verify_files(path: Path, read: Callable[[Path], Listing]) -> int:
    """Print whether the files of ``path`` are complete, by their headers and lengths; return 1 where they are not."""
    try:
        found = read(path)
    except ValueError as error:
        print(error)
        print(f"{path} is damaged.")
        return 1
    size = f"{found.values['all_bytes']:,} bytes"
    print(f"{path} has all its tensors: {counted(len(found.tensors), 'name')}, {size}. {_NO_CHECKSUMS}")
    return 0


_OTHERS: Mapping[str, Callable[[Path], Listing]] = {"huggingface": _huggingface, "nxd": _ranks, "dcp": _dcp}

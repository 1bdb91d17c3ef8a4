"""Hugging Face directories and files of NeuronX Distributed's ranks, as ``show`` and ``verify`` print them."""

from collections.abc import Callable
from pathlib import Path

from nxdpp.checkpoint.commands.listing import Listing, sized
from nxdpp.checkpoint.files.layout import layouts_of
from nxdpp.checkpoint.files.rank_file import KEY, RankFile, rank_files
from nxdpp.checkpoint.files.safetensors_reader import OpenFile, StoredTensor, read_header
from nxdpp.checkpoint.huggingface.quantised import method_of
from nxdpp.checkpoint.huggingface.read_directory import adapter_weights, settings_of, stored_tensors
from nxdpp.tensor.rank_files import rank_name

_NO_CHECKSUMS = "Such files have no checksums of values, so changed values are not found."


def show_huggingface(path: Path) -> Listing:
    """Return the content of a Hugging Face directory. Raises ``ValueError`` for a damaged one."""
    adapter, stored = _stored(path)
    layouts = layouts_of(stored)
    files = len({each.path for each in stored.values()})
    size = sum(each.bytes for each in layouts.values())
    settings = settings_of(path)
    classes = settings.get("architectures") or settings.get("model_type") or "unknown, without config.json"
    named = ", ".join(map(str, classes)) if isinstance(classes, list) else str(classes)
    lines = [("model", "adapter" if adapter else named)]
    quantised = method_of(settings)
    if quantised is not None:
        lines.append(("quantised", quantised))
    held = f"{len(layouts):,} tensors, {files:,} files, {sized(size)}"
    values = {"model": lines[0][1], "quantised": quantised, "all_tensors": len(layouts), "all_bytes": size}
    return Listing("huggingface", str(path), f"Hugging Face directory, {held}", lines, layouts, values=values)


def show_ranks(path: Path) -> Listing:
    """Return the tensors of tensor rank 0 on each stage. Raises ``ValueError`` for damaged files."""
    files = {place: RankFile(file, KEY) for place, file in rank_files(path).items()}
    tensor, pipeline = (max(place[at] for place in files) + 1 for at in (0, 1))
    layouts = {name: layout for stage in range(pipeline) for name, layout in files[0, stage].layouts.items()}
    size = sum(layout.bytes for file in files.values() for layout in file.layouts.values())
    lines = [(rank_name(*place), f"{len(file.layouts):,} tensors") for place, file in sorted(files.items())]
    held = f"{tensor} tensor x {pipeline} pipeline, {len(files):,} files, {sized(size)}"
    values = {"layout": {"tensor": tensor, "pipeline": pipeline}, "all_bytes": size}
    title = f"files of NeuronX Distributed's ranks, {held}. Shapes are those of tensor rank 0"
    return Listing("nxd", str(path), title, lines, layouts, values=values)


def verify_files(path: Path, read: Callable[[Path], Listing]) -> int:
    """Print whether the files of ``path`` are complete, by their headers and lengths; return 1 where they are not."""
    try:
        found = read(path)
    except ValueError as error:
        print(error)
        print(f"{path} is damaged.")
        return 1
    size = f"{found.values['all_bytes']:,} bytes"
    print(f"{path} has all its tensors: {len(found.tensors):,} names, {size}. {_NO_CHECKSUMS}")
    return 0


def _stored(path: Path) -> tuple[bool, dict[str, StoredTensor]]:
    """Return whether ``path`` is an adapter, and its tensors."""
    weights = adapter_weights(path)
    if weights is None:
        return False, stored_tensors(path)
    if not weights.is_file():
        raise ValueError(f"{path} has the configuration of an adapter, and {weights} is missing.")
    return True, read_header(weights, OpenFile())

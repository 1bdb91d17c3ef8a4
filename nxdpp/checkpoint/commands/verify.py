"""``python -m nxdpp checkpoint verify``: all bytes of a checkpoint against their checksums."""

from pathlib import Path

from nxdpp.checkpoint.commands.formats import format_of, opened
from nxdpp.checkpoint.distributed import directory
from nxdpp.checkpoint.distributed.directory import DOCUMENT
from nxdpp.checkpoint.distributed.document import tensors_of
from nxdpp.checkpoint.files.checksummed_reader import ChecksummedReader, DamagedFile
from nxdpp.checkpoint.files.layout import printable


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
    # transformers takes seconds to import.
    from nxdpp.checkpoint.commands.other_formats import show_huggingface, show_ranks, verify_files

    return verify_files(path, show_huggingface if kind == "huggingface" else show_ranks)


def _verify(path: Path) -> int:
    try:
        folder, document = opened(path)
    except DamagedFile as error:
        print(error)
        return 1
    spans = document.metadata.storage_data
    order = sorted(spans, key=lambda index: (spans[index].file, spans[index].start))
    damaged: dict[str, None] = {}
    with ChecksummedReader(folder) as reader:
        for index in order:
            try:
                reader.verify(spans[index])
            except (DamagedFile, OSError) as error:
                damaged[index.fqn] = None
                print(f"{printable(index.fqn, 300)}: {error}")
    tensors = tensors_of(document.metadata)
    files = len({span.file for span in spans.values()})
    size = sum(span.length for span in spans.values())
    held = f"{len(tensors):,} tensors in {files:,} files, {size:,} bytes"
    if damaged:
        print(f"{folder} is damaged: {len(damaged):,} of {held}.")
        return 1
    print(f"{folder} is whole: {held}.")
    return 0

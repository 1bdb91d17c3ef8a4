"""``python -m nxdpp checkpoint verify``: all bytes of a checkpoint against their checksums."""

from pathlib import Path

from nxdpp.checkpoint.commands.opened import opened
from nxdpp.checkpoint.distributed.document import tensors_of
from nxdpp.checkpoint.files.checksummed import ChecksummedReader, DamagedFile


def verify(path: Path) -> int:
    """Print each damaged tensor of the checkpoint with its file, and the result; return 1 for a damaged one.

    Raises ``ValueError`` for a path without a checkpoint.
    """
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
                print(f"{index.fqn}: {error}")
    tensors = tensors_of(document.metadata)
    files = len({span.file for span in spans.values()})
    size = sum(span.length for span in spans.values())
    held = f"{len(tensors):,} tensors in {files:,} files, {size:,} bytes"
    if damaged:
        print(f"{folder} is damaged: {len(damaged):,} of {held}.")
        return 1
    print(f"{folder} is whole: {held}.")
    return 0

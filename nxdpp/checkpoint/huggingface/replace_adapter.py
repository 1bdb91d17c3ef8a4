"""Replacement of the adapter of a directory by a complete new one.

::

    .unfinished/complete/       the new adapter, complete
    adapter_config.json         removed where the new one differs
    adapter_model.safetensors   replaced
    adapter_config.json         replaced last

Two files have no common rename, and PEFT has no field that names a file of weights. A save that is killed between them
leaves a directory that is no adapter for PEFT, never a mixture. ``load_pretrained`` then takes the new adapter, and the
next save puts it into its place. PEFT loads ``DIRECTORY/.unfinished/complete`` until the weights have moved.
"""

import os
import shutil
from pathlib import Path

from nxdpp.checkpoint.huggingface.read_directory import ADAPTER_CONFIG, ADAPTER_FILE, UNFINISHED
from nxdpp.checkpoint.huggingface.replace_checkpoint import differs, put

_COMPLETE = "complete"


def replace_adapter(made: Path, directory: Path) -> None:
    """Put the adapters in ``made``, complete in the unfinished folder of ``directory``, in the place of earlier ones.

    An adapter has a folder of its own unless its name is ``default``.
    """
    for file in list(filter(Path.is_file, made.rglob("*"))):
        _usual_permissions(file)
        with file.open("rb") as written:
            os.fsync(written.fileno())
    complete = directory / UNFINISHED / _COMPLETE
    shutil.rmtree(complete, ignore_errors=True)
    made.rename(complete)
    finish_adapter(directory)


def finish_adapter(directory: Path) -> None:
    """Move complete adapters from the unfinished folder of ``directory`` to their place; also after a kill."""
    complete = directory / UNFINISHED / _COMPLETE
    for config in sorted(complete.rglob(ADAPTER_CONFIG)):
        target = directory / config.parent.relative_to(complete)
        target.mkdir(exist_ok=True)
        if differs(target / ADAPTER_CONFIG, config):
            # A mixture of two adapters must not look complete.
            (target / ADAPTER_CONFIG).unlink()
        files = filter(Path.is_file, config.parent.iterdir())
        for file in sorted(files, key=lambda file: file.name == ADAPTER_CONFIG):
            put(file, target / file.name)


def adapter_weights(directory: Path) -> Path | None:
    """The file of the adapter's weights in ``directory``, or after a killed save; ``None`` where no adapter is."""
    if (directory / ADAPTER_CONFIG).is_file():
        return directory / ADAPTER_FILE
    above = directory.parent / UNFINISHED / _COMPLETE / directory.name
    for complete in (directory / UNFINISHED / _COMPLETE, above):
        if (complete / ADAPTER_CONFIG).is_file():
            moved = not (complete / ADAPTER_FILE).is_file()
            return (directory if moved else complete) / ADAPTER_FILE
    return None


def _usual_permissions(file: Path) -> None:
    # safetensors 0.8 lets only the owner read its files.
    probe = file.with_name(f"{file.name}.permissions")
    probe.touch()
    file.chmod(probe.stat().st_mode)
    os.unlink(probe)

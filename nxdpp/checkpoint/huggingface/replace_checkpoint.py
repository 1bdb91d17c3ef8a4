"""Replacement of the checkpoint of a directory by a complete new one, in one rename that makes the new one valid.

::

    model-1c5f09aa-00001-of-00002.safetensors    new files get names that the earlier checkpoint does not use
    model.safetensors.index.json                 replaced: from now on the new checkpoint is loaded
    model-00001-of-00002.safetensors             removed, then a link to the new file
    model.safetensors.index.json                 replaced: it has the usual names
    model-1c5f09aa-00001-of-00002.safetensors    removed

One file is ``model.safetensors``, which is replaced itself, and is loaded in preference to an index. So it is removed
last where an index replaces it.

A new ``config.json`` belongs to new weights, and two files have no common rename. The new configuration then names the
new index (``transformers_weights``) until that has its usual name. ``from_pretrained`` follows this field.

A process that is killed at any moment leaves a complete checkpoint, the earlier or the new one. File systems over a
network have these renames too.
"""

import json
import os
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nxdpp.checkpoint.huggingface.read_directory import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, WEIGHTS_FIELD

_OURS = re.compile(r"model(-[0-9a-f]{8})?(-\d{5}-of-\d{5}\.safetensors|\.safetensors\.index\.json)")
# Fields of a configuration that do not decide how weights are loaded.
_UNIMPORTANT = ("transformers_version", WEIGHTS_FIELD)


@dataclass(frozen=True)
class NewCheckpoint:
    """Complete files of a checkpoint, in a folder on the file system of ``directory``, which gets them.

    ``shards`` are files of weights in order, each with the names of its tensors; ``bytes`` is of all tensors.
    """

    directory: Path
    folder: Path
    shards: Mapping[Path, Sequence[str]]
    bytes: int

    def replace_earlier(self, configuration: Sequence[Path]) -> None:
        """Put the files and the ``configuration`` in the place of the earlier checkpoint, and remove that."""
        has_other_config = self._has_weights() and any(
            file.name == CONFIG_FILE and differs(self.directory / CONFIG_FILE, file) for file in configuration
        )
        if len(self.shards) == 1 and not has_other_config:
            kept = self._put_single(configuration)
        else:
            kept = self._put_shards(configuration, has_other_config)
        for file in list(self.directory.iterdir()):
            if file.name not in kept and (file.name == SINGLE_FILE or _OURS.fullmatch(file.name)):
                file.unlink(missing_ok=True)
        if INDEX_FILE in kept:
            self._give_usual_names(kept - {INDEX_FILE})

    def _give_usual_names(self, tagged: Collection[str]) -> None:
        """Give the files of the index names without a tag; file systems without hard links keep the tag."""
        names = self._names("")
        if names[0] in tagged:
            return
        links: list[Path] = []
        try:
            for old, new in zip(sorted(tagged), names, strict=True):
                (self.directory / new).hardlink_to(self.directory / old)
                links.append(self.directory / new)
        except OSError:
            for link in links:
                link.unlink()
            return
        put(self._write_index(names), self.directory / INDEX_FILE)
        for old in tagged:
            (self.directory / old).unlink()

    def _has_weights(self) -> bool:
        return any((self.directory / name).is_file() for name in (SINGLE_FILE, INDEX_FILE))

    def _put_single(self, configuration: Sequence[Path]) -> set[str]:
        for file in configuration:
            put(file, self.directory / file.name)
        (shard,) = self.shards
        put(shard, self.directory / SINGLE_FILE)
        return {SINGLE_FILE}

    def _put_shards(self, configuration: Sequence[Path], has_other_config: bool) -> set[str]:
        tag, names = self._free_names(has_other_config)
        moved = []
        try:
            for shard, name in zip(self.shards, names, strict=True):
                moved.append(self.directory / name)
                shard.replace(moved[-1])
            if has_other_config:
                moved.append(self.directory / f"model{tag}.safetensors.index.json")
                put(self._write_index(names), moved[-1])
        except BaseException:
            for path in moved:
                path.unlink(missing_ok=True)
            raise
        if has_other_config:
            (config,) = (file for file in configuration if file.name == CONFIG_FILE)
            put(self._write_pointing(config, moved[-1].name), self.directory / CONFIG_FILE)
            finish_replacement(self.directory, self.folder)
        else:
            put(self._write_index(names), self.directory / INDEX_FILE)
            (self.directory / SINGLE_FILE).unlink(missing_ok=True)
        for file in configuration:
            put(file, self.directory / file.name)
        return {*names, INDEX_FILE}

    def _free_names(self, needs_tag: bool) -> tuple[str, list[str]]:
        """Names of files that the directory does not have, with the tag in them."""
        tag = ""
        while True:
            names = self._names(tag)
            if not (needs_tag and not tag) and not any((self.directory / name).exists() for name in names):
                return tag, names
            tag = f"-{secrets.token_hex(4)}"

    def _names(self, tag: str) -> list[str]:
        count = len(self.shards)
        return [f"model{tag}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]

    def _write_index(self, names: Sequence[str]) -> Path:
        files = {tensor: name for name, tensors in zip(names, self.shards.values(), strict=True) for tensor in tensors}
        content = {"metadata": {"total_size": self.bytes}, "weight_map": files}
        return _write(self.folder / INDEX_FILE, json.dumps(content, indent=2, sort_keys=True))

    def _write_pointing(self, config: Path, index: str) -> Path:
        fields = {**json.loads(config.read_text()), WEIGHTS_FIELD: index}
        return _write(self.folder / f"pointing.{CONFIG_FILE}", json.dumps(fields, indent=2, sort_keys=True))


def finish_replacement(directory: Path, folder: Path) -> None:
    """Give the index that ``config.json`` of ``directory`` names its usual name; also for a save that was killed.

    Files are made in ``folder``. Nothing is done for a configuration that names no index that nxdpp has written.
    """
    fields = _fields(directory / CONFIG_FILE)
    name = fields.pop(WEIGHTS_FIELD, None) if isinstance(fields, dict) else None
    if not isinstance(name, str) or not _OURS.fullmatch(name) or not (directory / name).is_file():
        return
    put(_write(folder / f"own.{INDEX_FILE}", (directory / name).read_text()), directory / INDEX_FILE)
    (directory / SINGLE_FILE).unlink(missing_ok=True)
    put(_write(folder / f"own.{CONFIG_FILE}", json.dumps(fields, indent=2, sort_keys=True)), directory / CONFIG_FILE)
    (directory / name).unlink()


def put(source: Path, target: Path) -> None:
    """Replace ``target`` by ``source`` after its content has reached the disk."""
    with source.open("rb") as file:
        os.fsync(file.fileno())
    source.replace(target)


def _write(path: Path, text: str) -> Path:
    path.write_text(text + "\n")
    return path


def differs(earlier: Path, new: Path) -> bool:
    """Return whether two configurations in JSON load weights differently; not for a missing one."""
    before = _fields(earlier)
    return isinstance(before, dict) and _important(before) != _important(_fields(new))


def _important(fields: Mapping[str, Any]) -> dict[str, Any]:
    # PEFT writes sets as lists in any order.
    return {
        name: sorted(map(str, value)) if isinstance(value, list) else value
        for name, value in fields.items()
        if name not in _UNIMPORTANT
    }


def _fields(path: Path) -> Any:
    """The content of a JSON file; ``None`` for one that is missing or damaged."""
    with suppress(OSError, ValueError, RecursionError):
        return json.loads(path.read_text())
    return None

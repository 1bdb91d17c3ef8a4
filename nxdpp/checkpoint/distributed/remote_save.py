"""A save into a store of objects: each rank writes its file in a local folder and sends it.

::

    all ranks    write the file ─▶ send it ─▶ remove it here
    rank 0       names and sizes in the store ─▶ document, latest, removal of older checkpoints: here, then there
"""

import logging
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from nxdpp.checkpoint.distributed.directory import DOCUMENT, LATEST
from nxdpp.checkpoint.distributed.remote_directory import RemoteDirectory, staged
from nxdpp.checkpoint.distributed.save import Save
from nxdpp.checkpoint.files.pieces import FileSpan
from nxdpp.ranks.exchange import Exchange

_logger = logging.getLogger(__name__)


class RemoteSave(Save):
    """One save into the directory at ``address``; as ``Save``, with a lock on nothing: stores have none.

    Args:
        address: of the directory of the training's checkpoints.
        tag: of this one.
        kept, exchange: as of ``Save``.
    """

    _remote: RemoteDirectory
    _needed = "all hosts must reach the same store"

    def __init__(self, address: str, tag: str, kept: int | None, exchange: Exchange) -> None:
        super().__init__(Path(tag), kept, exchange)
        self._address, self._tag = address, tag

    def write(self, tensors: dict[str, torch.Tensor]) -> None:
        """Write and send the values of ``plan``, and make the checkpoint count; as ``Save.write``."""
        with ExitStack() as stack:
            self._remote = self.exchange.together(lambda: stack.enter_context(staged(self._address)))
            self._folder = self._remote.local / self._tag
            super().write(tensors)

    def _claim(self) -> None:
        """Lock nothing."""

    def _write_file(self, file: Path, tensors: dict[str, torch.Tensor]) -> dict[str, FileSpan]:
        spans = super()._write_file(file, tensors)
        if spans:
            try:
                self._remote.upload(file)
            except OSError as error:
                raise _not_saved(error, self.exchange.rank) from error
            file.unlink()
        return spans

    def _remove(self, file: Path) -> None:
        with suppress(OSError):
            self._remote.remove([file])
        super()._remove(file)

    def _finish(
        self, of_ranks: list[tuple[str, dict[MetadataIndex, FileSpan], Any]]
    ) -> Sequence[tuple[bool, Exception | None]]:
        outcome: tuple[bool, Exception | None]
        try:
            before = self._remote.fill(whole=self._kept is not None)
        except OSError as error:
            outcome = False, _not_saved(error, 0)
        else:
            outcome = super()._finish(of_ranks)[0]
            if outcome[0]:
                outcome = self._published(before, outcome[1])
        return [outcome] * len(of_ranks)

    def _published(self, before: Sequence[Path], failed: Exception | None) -> tuple[bool, Exception | None]:
        """Send what the local folder has now, and remove what it has no longer.

        After ``failed``, an error of the local folder, only the document is sent. Returns whether the checkpoint
        counts, and an error. It also counts if the store may have its document: the files that it names must stay.
        """
        document = self._folder / DOCUMENT
        try:
            self._remote.replace(document)
        except OSError as error:
            try:
                if not self._remote.has(document):
                    return False, _not_saved(error, 0)
            except OSError:
                unknown = f"{error.strerror}. Whether the store has it is not known: its files stay"
                return True, OSError(error.errno, f"rank 0 {unknown}")
        if failed is not None:
            return True, failed
        saved = f"{self._address}/{self._tag} is saved"
        try:
            self._remote.replace(self._remote.local / LATEST)
        except OSError as error:
            remedy = f"load_checkpoint with tag={self._tag!r} loads it, and without a tag an earlier one"
            return True, OSError(error.errno, f"{error.strerror}. {saved}: {remedy}")
        try:
            self._remote.remove(path for path in before if not path.exists())
        except OSError as error:
            _logger.warning("%s, and an older checkpoint cannot be removed: %s", saved, error)
        return True, None


def _not_saved(error: OSError, rank: int) -> OSError:
    return OSError(
        error.errno, f"rank {rank} {error.strerror}. Earlier checkpoints are there, and the training can go on"
    )

"""Load of the first checkpoint that is whole: a damaged one is named in a warning, and the next older one is loaded.

::

    step_30    damaged: its checksum differs on rank 2    all ranks: the next one
    step_20    whole: overwrites all that was read of step_30
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nxdpp.checkpoint.distributed.load import MIXED, Load
from nxdpp.checkpoint.distributed.load_targets import LoadArguments
from nxdpp.checkpoint.distributed.looks_whole import keep_damaged
from nxdpp.checkpoint.distributed.ranks import Exchange
from nxdpp.checkpoint.files.checksummed import DamagedFile

_logger = logging.getLogger(__name__)


def load_first_whole(folders: Sequence[Path], exchange: Exchange, given: LoadArguments) -> Any:
    """Load the first checkpoint of ``folders`` that is whole, and return its user content; collective over all ranks.

    Raises ``DamagedFile`` if none of them is whole, and as ``Load`` does.
    """
    half_read: set[str] = set()
    for folder, is_last in zip(folders, [False] * (len(folders) - 1) + [True], strict=True):
        load = None
        try:
            load = Load(folder, exchange)
            _prepare(load, folder, given, half_read)
            return load.read()
        except Exception as error:
            # The kinds are those of all ranks: no rank goes on alone.
            are_damaged = bool(exchange.failures) and all(kind is DamagedFile for kind in exchange.failures)
            if are_damaged:
                keep_damaged(folder)
            if half_read and MIXED not in getattr(error, "__notes__", ()):
                error.add_note(MIXED)
            if is_last or not are_damaged:
                raise
            half_read |= load.names_in_use() if load is not None else set()
            if exchange.rank == 0:
                _logger.warning(
                    "%s: the next older checkpoint is loaded in the place of %s", str(error).rstrip("."), folder
                )
    raise AssertionError("there is a folder")


def _prepare(load: Load, folder: Path, given: LoadArguments, half_read: set[str]) -> None:
    """Verify that ``load`` fits, and that it overwrites the names that were read of a damaged checkpoint."""
    load.prepare(given)
    left = sorted(half_read - load.names_in_use())

    def check() -> None:
        if left:
            raise ValueError(
                f"{folder} lacks {left[0]} and {len(left) - 1} more that were read from a damaged checkpoint: load a "
                f"checkpoint with all names of the model."
            )

    if half_read:
        load.exchange.together(check)

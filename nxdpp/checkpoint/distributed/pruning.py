"""Removal of older checkpoints, and of what unfinished saves have left.

::

    step_50    saved now                     kept
    step_40    truncated                     kept, and not counted
    step_30    looks whole                   kept: with num_kept_ckpts=2 the last one
    step_20    any                           removed: document first

Only files that a save has made are removed, and directories that are empty then. Links stay.
"""

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from nxdpp.checkpoint.distributed import directory
from nxdpp.checkpoint.distributed.directory import DOCUMENT, number_of
from nxdpp.checkpoint.distributed.looks_whole import looks_whole


def prune(path: Path, kept: int | None, current: str, named: Iterable[str]) -> list[OSError]:
    """Remove the files of unfinished saves, and checkpoints older than the ``kept`` newest ones that look whole.

    Args:
        path: directory of the checkpoints.
        kept: number of checkpoints to keep; ``None`` keeps all.
        current: tag of the checkpoint that was saved last.
        named: the files that its document names.

    Returns:
        The errors of removals. The other removals still happen.
    """
    failures: list[OSError] = []

    def attempt(act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as error:
            failures.append(error)

    attempt(lambda: _remove_files(path / current, set(named)))
    checkpoints = {folder.name for folder in directory.folders(path)}
    for found in list(path.iterdir()):
        if directory.is_new_latest(found.name) and found.is_file():
            attempt(found.unlink)
        elif found.name != current and found.name not in checkpoints and _may_be_ours(found):
            attempt(partial(_remove_files, found, set()))
    for tag in [] if kept is None else list(_superfluous(path, kept, current, checkpoints)):
        attempt(partial(_remove_checkpoint, path / tag))
    return failures


def _superfluous(path: Path, kept: int, current: str, checkpoints: Iterable[str]) -> Iterator[str]:
    """The tags after the ``kept`` newest checkpoints that look whole; tags without a number come last."""
    older = [tag for tag in checkpoints if tag != current and not (path / tag).is_symlink()]
    count = 1
    for tag in sorted(older, key=lambda tag: (number_of(path / tag), tag), reverse=True):
        if count >= kept:
            yield tag
        elif looks_whole(path / tag):
            count += 1


def _remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint. It stops counting with the first step."""
    (folder / DOCUMENT).unlink(missing_ok=True)
    directory.flush_directory(folder)
    _remove_files(folder, set())


def _may_be_ours(folder: Path) -> bool:
    """Return whether ``folder`` is a directory that this process may list, with something in it."""
    with suppress(PermissionError):
        return folder.is_dir() and not folder.is_symlink() and any(folder.iterdir())
    return False


def _remove_files(folder: Path, named: Container[str]) -> None:
    """Remove the files of saves except ``named``, and the directory if that empties it."""
    ours = [each for each in folder.iterdir() if directory.is_file_of_save(each.name) and each.name not in named]
    for file in ours:
        file.unlink(missing_ok=True)
    if ours and not any(folder.iterdir()):
        folder.rmdir()

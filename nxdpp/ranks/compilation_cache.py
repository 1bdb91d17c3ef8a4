"""The argument ``compilation_cache``: a folder in which XLA keeps compiled graphs from one start to the next."""

import os
from pathlib import Path


def checked_folder(given: object, device: str | None) -> Path | None:
    """Return ``compilation_cache`` as an absolute path; ``None`` for none.

    Raises ``TypeError`` for anything but a path, ``ValueError`` for a device other than XLA's and for a path where no
    folder can be.
    """
    if given is None:
        return None
    if not isinstance(given, str | os.PathLike):
        raise TypeError(f"compilation_cache={given!r:.80} must be the path of a folder, or None for no cache.")
    if device != "xla":
        raise ValueError(
            f"compilation_cache={str(given)!r} is for device='xla', and device={device!r} compiles no graphs: leave "
            f"it out."
        )
    if not str(given):
        raise ValueError("compilation_cache='' names no folder: give its path, or None for no cache.")
    folder = Path(given).absolute()
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir():
        raise ValueError(f"compilation_cache={str(given)!r} must be a folder, and {nearest} is a file.")
    if not os.access(nearest, os.W_OK):
        raise ValueError(f"compilation_cache={str(given)!r} cannot be written: no permission in {nearest}.")
    return folder

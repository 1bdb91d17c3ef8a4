"""Autocast of all device types at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


def autocast_types() -> list[str]:
    """The device types for which autocast is on here."""
    return [kind for kind in _types() if torch.is_autocast_enabled(kind)]


@contextmanager
def without_autocast() -> Iterator[None]:
    """Switch autocast off in the block, as torch advises for a backward."""
    on = autocast_types()
    for kind in on:
        torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        for kind in on:
            torch.set_autocast_enabled(kind, True)


@cache
def _types() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    return tuple({"cuda": None, "xla": None, "cpu": None, accelerator.type if accelerator else "cpu": None})

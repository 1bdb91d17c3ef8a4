"""Autocast of all device types at once."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_accelerator = torch.accelerator.current_accelerator()
_of_torch = ["cuda", "xla", "cpu", "cpu" if _accelerator is None else _accelerator.type]
# A package may register its type later.
AUTOCAST_TYPES = tuple(dict.fromkeys([*_of_torch, torch.device("privateuseone").type]))
"""The device types for which a program may switch autocast on."""


def autocast_types() -> list[str]:
    """The device types for which autocast is on here."""
    return list(filter(torch.is_autocast_enabled, AUTOCAST_TYPES))


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

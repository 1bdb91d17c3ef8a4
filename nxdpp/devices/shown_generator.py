"""The random generator of a device type as the module of that type in torch, such as ``torch.xla``.

``torch.utils.checkpoint`` looks for it there, and fails for a device type without one.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any


class ShownGenerator:
    """The generator of this process's one device. ``get`` and ``set_to`` read and set its state, a number."""

    _initialized = True

    def __init__(self, get: Callable[[], int], set_to: Callable[[int], object]) -> None:
        self._get = get
        self._set_to = set_to

    def device(self, index: int) -> AbstractContextManager[None]:
        """Return a context of the device."""
        return nullcontext()

    def device_count(self) -> int:
        """Return 1."""
        return 1

    def get_rng_state(self, device: Any = None) -> int:
        """Return the state: a number of 64 bits."""
        return int(self._get())

    def set_rng_state(self, state: int, device: Any = None) -> None:
        """Set the state."""
        self._set_to(state)

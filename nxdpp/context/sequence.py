"""What the layer that runs in this thread tells the modules in it about its sequences."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

DIMENSION = {1: 0, 2: 1, 3: 1, 4: 2}
"""Dimension of tokens by the number of dimensions: of ``(T,)``, ``(B, T)``, ``(B, T, D)`` and ``(X, B, T, D)``."""


class Sequences(threading.local):
    """The sequences of a layer.

    Attributes:
        length: of the whole sequences; ``None`` outside of layers.
        wholes: the whole tensor of each that was cut, by the ``id`` of the cut one.
        calls: how often attention, or a module that is given whole sequences, has been called.
        is_probed: each token gets a value of its own alone.
        are_given: a module is given whole sequences, and runs as in one process.
    """

    length: int | None = None
    wholes: dict[int, torch.Tensor] = {}  # replaced, never changed
    calls = 0
    is_probed = False
    are_given = False

    @contextmanager
    def set(self, **values: Any) -> Iterator[None]:
        """Have these values inside."""
        before = {name: getattr(self, name) for name in values}
        for name, value in values.items():
            setattr(self, name, value)
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)


sequences = Sequences()

"""Batches of an evaluation in windows: those of one pass through the stages."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any

from accelerate.state import GradientState
from torch.utils.data import DataLoader


class Windows:
    """The batches of ``loader``, read in windows and given one by one; other attributes are those of the loader.

    accelerate asks it for the end of the data, in place of the loader, which has read ahead. Batches are read in
    ``fetching()``.

    Attributes:
        window: the batches of the present window that were not given yet, before each one is given.
        end_of_dataloader: ``True`` from the last batch on.
        remainder: rows of the last batch of all replicas; 0 for a full one, and -1 where the data has no length.
    """

    def __init__(
        self, loader: DataLoader[Any], size: int, fetching: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.loader = loader
        self.size = size
        self._fetching = fetching
        self.window: list[Any] = []
        self.end_of_dataloader = False
        self.remainder = -1

    def __iter__(self) -> Iterator[Any]:
        self.end_of_dataloader = False
        with self._fetching():
            batches = iter(self.loader)
            ahead = list(islice(batches, self.size))
        self.remainder = getattr(self.loader, "remainder", -1)
        state = GradientState()
        state._add_dataloader(self)
        try:
            while ahead:
                self.window = ahead
                with self._fetching():
                    ahead = list(islice(batches, self.size))
                while self.window:
                    self.end_of_dataloader = not ahead and len(self.window) == 1
                    yield self.window[0]
                    self.window = self.window[1:]
        finally:
            state._remove_dataloader(self)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

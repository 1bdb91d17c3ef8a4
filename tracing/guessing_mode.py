"""Fake tensors that answer questions about data with a guess."""

from typing import Any, Self

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

# Guesses in one run of the nodes that lead to an answer.
_MOST_GUESSES = 100


class TooManyGuessesError(Exception):
    """Data decide when the run ends."""


class GuessingMode(FakeTensorMode):
    """Fake tensors whose every element is ``guess``; ``asks`` tells whether the running code may read one."""

    def __init__(self, guess: bool) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.guess = guess
        self._guesses = 0
        self.asks = True

    def __enter__(self) -> Self:
        self._guesses = 0
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._local_scalar_dense.default or not self.asks:
            return super().__torch_dispatch__(func, types, args, kwargs)
        # A loop that data end would not end with a guess.
        self._guesses += 1
        if self._guesses > _MOST_GUESSES:
            raise TooManyGuessesError(f"more than {_MOST_GUESSES} answers depend on data")
        return self.guess

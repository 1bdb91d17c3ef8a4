"""Runs of code on fake tensors, for its sizes: copies of modules, guesses for questions about data."""

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import numpy
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from nxdpp.tracing.modules import listings

# Guesses in one run of the nodes that lead to an answer.
_MOST_GUESSES = 100


class FakeCopies:
    """Fake copies of modules and tensors, with shapes and dtypes and without memory; needs a ``FakeTensorMode``.

    Each tensor has one copy. All copies are on the CPU, also of tensors on the meta device.
    """

    def __init__(self) -> None:
        self._memo: dict[int, Any] = {}
        self._modules: dict[nn.Module, nn.Module] = {}
        self._originals: list[torch.Tensor] = []

    def module(self, module: nn.Module) -> nn.Module:
        """A copy of ``module`` with fake parameters, buffers and tensor attributes."""
        if module not in self._modules:
            for part in listings.modules(module):
                for value in (*part._parameters.values(), *part._buffers.values(), *vars(part).values()):
                    # Containers may hold results of the last run, which have a graph and cannot be copied.
                    for tensor in pytree.tree_leaves(value) if isinstance(value, tuple | list | dict) else (value,):
                        if isinstance(tensor, torch.Tensor):
                            self.tensor(tensor)
            self._modules[module] = copy.deepcopy(module, dict(self._memo))
        return self._modules[module]

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor like ``tensor``; the same one at each call."""
        if id(tensor) not in self._memo:
            fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            self._memo[id(tensor)] = fake
            # No other tensor gets its id while it is kept.
            self._originals.append(tensor)
        copied: torch.Tensor = self._memo[id(tensor)]
        return copied


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


@contextmanager
def unchanged_generators() -> Iterator[None]:
    """Restore the global generators of Python and NumPy afterwards. Fake tensors draw from none of torch's."""
    of_python, of_numpy = random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        numpy.random.set_state(of_numpy)

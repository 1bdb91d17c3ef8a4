"""Shared experts of a layer, which run while the tokens of its other experts are on their way.

Types of transformers run them last, on what the block of experts was given::

    forward      router ─ tokens leave ─ [shared experts] ─ tokens are there ─ experts ─ ...
    backward     ... ─ experts ─ gradients leave ─ [shared experts] ─ gradients are there ─ router

What is computed is the same, in another order of the operations; each sum of gradients keeps its order. A block that
runs its shared experts first, or on another tensor, is left as it is. That shows in the first step: until its end no
block changes its order, so that a layer that is computed again does the same as in its forward.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from nxdpp.ground.torch_names import VERSION
from nxdpp.tensor.models.modules import override

# What transformers' types call them, next to their experts.
_NAMES = ("shared_experts", "shared_expert", "shared_mlp")


class _Block:
    """A forward of a block that has shared experts."""

    def __init__(self, shared: nn.Module, given: Any) -> None:
        self.shared, self.given = shared, given
        self.output: Any = None
        # Changes of ``given`` in place, when the output was computed of it.
        self.version = 0
        self.has_exchanged = False

    def run_ahead(self) -> None:
        """Compute the output of the shared experts."""
        assert isinstance(self.shared, SharedExperts), "they can run ahead"
        self.version, self.output = _version(self.given), self.shared.run_ahead(self.given)


class _Running(threading.local):
    """The blocks that run in a thread."""

    def __init__(self) -> None:
        self.blocks: list[_Block] = []


_running = _Running()
# Whether shared experts can run ahead, and what the present step has shown of others.
_ahead: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
_shown: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


class BlockOfExperts(nn.Module):
    """Module with experts over ranks and shared ones."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the class."""
        shared = next(getattr(self, name) for name in _NAMES if hasattr(self, name))
        with _runs(_Block(shared, next(iter((*args, *kwargs.values())), None))):
            return super().forward(*args, **kwargs)


class SharedExperts(nn.Module):
    """Shared experts of a ``BlockOfExperts``."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what has been computed ahead, or run the forward of the class."""
        block = _running.blocks[-1] if _running.blocks else None
        if block is not None and block.shared is self:
            is_same = len(args) == 1 and not kwargs and args[0] is block.given
            if block.output is not None and is_same and _version(block.given) == block.version:
                output, block.output = block.output, None
                return output
            _shown[self] = _shown.get(self, True) and is_same and block.has_exchanged
        return super().forward(*args, **kwargs)

    def run_ahead(self, given: torch.Tensor) -> Any:
        """Run the forward of the class."""
        return super().forward(given)


def find_shared(block: nn.Module) -> None:
    """Let shared experts of ``block``, whose other experts are divided over ranks, run ahead."""
    shared = next((each for name in _NAMES if isinstance(each := getattr(block, name, None), nn.Module)), None)
    # Dropout would draw other numbers.
    if shared is not None and not any(getattr(each, "p", 0) for each in shared.modules()):
        override(block, BlockOfExperts)
        override(shared, SharedExperts)


def run_meanwhile() -> None:
    """Run the shared experts of the block that runs, whose tokens have left."""
    block = _running.blocks[-1] if _running.blocks else None
    if block is not None and not block.has_exchanged:
        block.has_exchanged = True
        if _ahead.get(block.shared, False):
            block.run_ahead()


def settle() -> None:
    """Let those run ahead from the next step on that could have run ahead in this one."""
    for shared, could in _shown.items():
        _ahead.setdefault(shared, could)
    _shown.clear()


def _version(tensor: torch.Tensor) -> int:
    """Return the number of changes of ``tensor`` in place; tensors of inference mode count none."""
    return -1 if tensor.is_inference() else int(VERSION.of(tensor))


@contextmanager
def _runs(block: _Block) -> Iterator[None]:
    _running.blocks.append(block)
    try:
        yield
    finally:
        _running.blocks.pop()

"""The tensors that gloo's threads hold during a functional collective."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from nxdpp.ground.torch_names import COLLECTIVES


class _Recorder:
    """``torch.ops._c10d_functional``, whose collectives note their input and their result."""

    def __init__(self, held: list[torch.Tensor]) -> None:
        self._held = held

    def __getattr__(self, name: str) -> Callable[..., torch.Tensor]:
        operation = getattr(torch.ops._c10d_functional, name)

        def run(tensor: torch.Tensor, *arguments: Any) -> torch.Tensor:
            result: torch.Tensor = operation(tensor, *arguments)
            if name != "wait_tensor":
                self._held += [tensor, result]
            return result

        return run


@contextmanager
def held_tensors() -> Iterator[list[torch.Tensor]]:
    """Give the list of the tensors of all functional collectives of the block."""
    held: list[torch.Tensor] = []
    with patch.object(COLLECTIVES, "found", _Recorder(held)):
        yield held


def holds_graph(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` keeps a graph alive, by itself or as a view."""
    return tensor.requires_grad or (tensor._base is not None and tensor._base.requires_grad)

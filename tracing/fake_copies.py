"""Fake copies of modules and tensors, on which code runs for its sizes."""

import copy
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from nxdpp.tracing import listings


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

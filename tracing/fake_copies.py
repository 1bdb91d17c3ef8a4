"""Copies of modules and tensors on the fake device: shapes and dtypes, no memory."""

import copy
from typing import Any

import torch
from torch import nn


class FakeCopies:
    """Makes fake copies, of each tensor one; to be used inside a ``FakeTensorMode``.

    All copies are on the CPU, whatever device the originals are on, the meta device included.
    """

    def __init__(self) -> None:
        self._memo: dict[int, Any] = {}
        self._modules: dict[nn.Module, nn.Module] = {}
        self._originals: list[torch.Tensor] = []

    def module(self, module: nn.Module) -> nn.Module:
        """A copy of ``module`` with fake parameters and buffers, and fake tensors in the place of other tensors."""
        if module not in self._modules:
            for part in module.modules():
                for value in (*part._parameters.values(), *part._buffers.values(), *vars(part).values()):
                    if isinstance(value, torch.Tensor):
                        self.tensor(value)
            self._modules[module] = copy.deepcopy(module, dict(self._memo))
        return self._modules[module]

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor like ``tensor``; the same one at each call."""
        if id(tensor) not in self._memo:
            fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            self._memo[id(tensor)] = fake
            # No other tensor can take its identity as long as it is kept.
            self._originals.append(tensor)
        copied: torch.Tensor = self._memo[id(tensor)]
        return copied

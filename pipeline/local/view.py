"""What a user sees of a rank's part of a model: the names are those of the whole model."""

from collections.abc import Iterator, Mapping
from typing import Any, Self

import torch
from torch import nn


class LocalView(nn.Module):
    """A module that lists what its ``local_module`` holds, and is itself neither called nor copied."""

    local_module: nn.Module

    def local_named_parameters(self, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under their original names; takes what ``named_parameters`` takes."""
        return self.local_module.named_parameters(**kwargs)

    def local_parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters."""
        return self.local_module.parameters()

    def local_named_buffers(self, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's buffers under their original names; takes what ``named_buffers`` takes."""
        return self.local_module.named_buffers(**kwargs)

    def local_named_modules(self, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """This rank's modules under their original names; takes what ``named_modules`` takes.

        What stands above the layers is in its place as an empty ``nn.Module``.
        """
        yield from self.local_module.named_modules(**kwargs)

    def local_state_dict(self, **kwargs: Any) -> dict[str, Any]:
        """This rank's part of the model's state dict, under its original names."""
        return self.local_module.state_dict(**kwargs)

    def load_local_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load this rank's part of a state dict; with ``strict`` the names must be just the local ones.

        What is on the meta device gets memory for what it is given; ``RuntimeError`` then for an optimizer that holds
        it.
        """
        return self.load_state_dict(state_dict, strict=strict)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """The same as ``local_named_modules``; parameters and buffers of this module follow from it."""
        yield from self.local_module.named_modules(*args, **kwargs)

    def get_submodule(self, target: str) -> nn.Module:
        """The local module of this original name; ``get_parameter`` and ``get_buffer`` follow from it."""
        return self.local_module.get_submodule(target)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The same as ``local_state_dict``."""
        return self.local_module.state_dict(*args, **kwargs)

    def to_empty(self, *, device: Any, recurse: bool = True) -> Self:
        """Not possible: raises ``RuntimeError``. What is in fresh memory would be trained on."""
        raise RuntimeError(
            "to_empty() would leave the parameters with whatever is in fresh memory: call move_model_to_device() or "
            "materialise(), which initialise them, nxdpp.load_pretrained(model, directory), or load_state_dict, which "
            "need no memory made before."
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Not how a pipeline runs: raises ``RuntimeError``."""
        raise RuntimeError(
            "a pipelined model is not called: use run_train(**inputs) for forward and backward, run_eval(**inputs) "
            "for forward alone."
        )

    def __deepcopy__(self, memo: Any) -> Any:
        """Not possible: raises ``TypeError``. A stage has connections to its neighbours."""
        raise TypeError("a pipelined model cannot be copied; keep its local_state_dict() instead.")

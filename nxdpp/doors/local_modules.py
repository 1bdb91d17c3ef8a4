"""Models that no ``NxDPPModel`` wraps: their modules for ``apply_checkpoint``, and second objects of parameters."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from nxdpp.tensor.move_model_to_device import keep_attributes


class LocalModules:
    """The attributes that ``apply_checkpoint`` reads of a wrapped model.

    Args:
        whole: the whole model.
        local: this rank's modules, under their names in the whole.
        layers: names of the layers of this rank.
    """

    rank = 0

    def __init__(self, whole: nn.Module, local: nn.Module, layers: Sequence[str] = ()) -> None:
        self.original_module = whole
        self._local = local
        self.layers = self.stage_layers = list(layers)

    def local_named_modules(self, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Give this rank's modules under their original names."""
        yield from self._local.named_modules(**kwargs)


def over_the_same_memory(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter over the memory of ``parameter``, with its class and attributes."""
    other = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    keep_attributes(parameter, other)
    return other

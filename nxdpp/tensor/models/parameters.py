"""Parameters of which this rank keeps its part."""

from typing import Any

import torch
from torch import nn

from nxdpp.ground.torch_names import PARAMETERS
from nxdpp.initialization.allocation import with_type_of
from nxdpp.initialization.parts import PartOf, mark_part, part_of
from nxdpp.ranks import parallel_state
from nxdpp.tensor.models.modules import override
from nxdpp.tensor.tensor_attributes import KeepsAttributes, set_tensor_model_parallel_attributes


class Parts:
    """Parts of the parameters of one model; a tied parameter has one part, wherever it is."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def divide(self, module: nn.Module, key: str, dim: int, stride: int = 1, padded: int = 0) -> None:
        """Replace the parameter ``key`` of ``module`` by this rank's part along ``dim``, padded to ``padded`` elements.

        Raises ``ValueError`` for a tied parameter that is divided in two ways.
        """
        parameter = PARAMETERS.of(module).get(key)
        if parameter is None:
            return
        if id(parameter) not in self._made:
            self._made[id(parameter)] = parameter, _part(parameter, dim % parameter.dim(), stride, padded)
        part = self._made[id(parameter)][1]
        made = part_of(part)
        assert made is not None
        if (made.dim, made.stride) != (dim % parameter.dim(), stride):
            raise ValueError(
                f"the parameter {key} of a {type(module).__name__}, of shape {tuple(parameter.shape)}, is tied, and is "
                f"divided along dimension {made.dim} and {dim}: give a plan that divides it in one way"
            )
        PARAMETERS.of(module)[key] = part
        if not isinstance(module, KeepsAttributes):
            override(module, KeepsAttributes)

    def replace_tied(self, model: nn.Module) -> None:
        """Replace each divided parameter by its part under its other names too."""
        for module in model.modules():
            for key, parameter in PARAMETERS.of(module).items():
                if id(parameter) in self._made:
                    PARAMETERS.of(module)[key] = self._made[id(parameter)][1]


def _part(parameter: nn.Parameter, dim: int, stride: int, padded: int) -> nn.Parameter:
    count, index = parallel_state.get_tensor_model_parallel_size(), parallel_state.get_tensor_model_parallel_rank()
    # The record of deferred_init knows the meta tensor itself.
    whole = parameter if parameter.is_meta else torch.empty_like(parameter, device="meta", requires_grad=False)
    description = PartOf(whole, dim, index, count, stride, padded)
    with torch.no_grad():
        taken = description.take(parameter)
    part: Any = with_type_of(taken, parameter)
    set_tensor_model_parallel_attributes(part, True, dim, stride, count)
    part.whole_size = parameter.shape[dim]
    mark_part(part, description)
    result: nn.Parameter = part
    return result

"""Base of the layers whose parameters are divided over the tensor-parallel ranks."""

from typing import Any

import torch
from torch import nn

from nxdpp.parallel_layers import parallel_state
from nxdpp.parallel_layers.tensor_attributes import KeepsAttributes, set_tensor_model_parallel_attributes


class ParallelLayer(KeepsAttributes):
    """A layer of which this rank has a part of each parameter.

    Raises ``RuntimeError`` before ``initialize_model_parallel``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tensor_parallel_size = parallel_state.get_tensor_model_parallel_size()

    def _add_part(
        self,
        name: str,
        shape: tuple[int, ...],
        dim: int,
        dtype: torch.dtype,
        device: Any,
        *,
        stride: int = 1,
        padded: int | None = None,
        copies: int = 1,
    ) -> None:
        """Register the unwritten parameter ``name``, this rank's part of a whole of ``shape``.

        The whole, padded to ``padded`` elements, is divided along ``dim``. ``copies`` ranks have each part.
        """
        parts = self.tensor_parallel_size // copies
        own = list(shape)
        own[dim] = (padded or shape[dim]) // parts
        parameter = nn.Parameter(torch.empty(own, dtype=dtype, device=device or None))
        set_tensor_model_parallel_attributes(parameter, True, dim, stride, parts)
        parameter.whole_size = shape[dim]  # type: ignore[attr-defined]  # an attribute of ours on a tensor
        self.register_parameter(name, parameter)

    def _check_group(self) -> None:
        size = parallel_state.get_tensor_model_parallel_size()
        if size != self.tensor_parallel_size:
            raise RuntimeError(
                f"a {type(self).__name__} was built for a tensor-parallel size of {self.tensor_parallel_size}, and "
                f"runs with {size}: build the model after initialize_model_parallel"
            )

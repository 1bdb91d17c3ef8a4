"""Base of the layers whose parameters are divided over the tensor-parallel ranks."""

from typing import Any

import torch
from torch import nn

from nxdpp.ranks import parallel_state
from nxdpp.tensor.tensor_attributes import KeepsAttributes, set_tensor_model_parallel_attributes


class ParallelLayer(KeepsAttributes):
    """A layer of which this rank has a part of each parameter.

    Raises ``RuntimeError`` before ``initialize_model_parallel``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tensor_parallel_size = parallel_state.get_tensor_model_parallel_size()
        self.tensor_parallel_rank = parallel_state.get_tensor_model_parallel_rank()

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
        parameter = nn.Parameter(torch.empty(own, dtype=dtype, device=given_device(device)))
        set_tensor_model_parallel_attributes(parameter, True, dim, stride, parts)
        parameter.whole_size = shape[dim]  # type: ignore[attr-defined]  # an attribute of ours on a tensor
        self.register_parameter(name, parameter)

    def _check_group(self) -> None:
        size, rank = parallel_state.get_tensor_model_parallel_size(), parallel_state.get_tensor_model_parallel_rank()
        if (size, rank) != (self.tensor_parallel_size, self.tensor_parallel_rank):
            raise RuntimeError(
                f"a {type(self).__name__} was built on tensor-parallel rank {self.tensor_parallel_rank} of "
                f"{self.tensor_parallel_size}, and runs on rank {rank} of {size}: build the model after "
                f"initialize_model_parallel"
            )


def given_device(device: torch.device | str | int | None) -> torch.device | str | int | None:
    """Return ``device``, and ``None`` for ``False``, the default that NxD's guide prints for a row-parallel layer."""
    return None if device is False else device

"""Base of the layers whose parameters are divided over the tensor-parallel ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from nxdpp.ranks import parallel_state
from nxdpp.tensor.tensor_attributes import KeepsAttributes, set_tensor_model_parallel_attributes


class ParallelLayer(KeepsAttributes):
    """A layer of which this rank has a part of each parameter.

    Raises ``RuntimeError`` before ``initialize_model_parallel``, and ``ValueError`` for a
    ``tensor_model_parallel_group`` that is not this rank's.
    """

    def __init__(self, tensor_model_parallel_group: ProcessGroup | None = None) -> None:
        super().__init__()
        if tensor_model_parallel_group is not None:
            _check_ranks(type(self).__name__, tensor_model_parallel_group)
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
        parameter.whole_size = shape[dim]  # type: ignore[attr-defined]  # nxdpp's own attribute of a tensor
        self.register_parameter(name, parameter)

    def _check_group(self) -> None:
        size, rank = parallel_state.get_tensor_model_parallel_size(), parallel_state.get_tensor_model_parallel_rank()
        if (size, rank) != (self.tensor_parallel_size, self.tensor_parallel_rank):
            raise RuntimeError(
                f"a {type(self).__name__} was built on tensor-parallel rank {self.tensor_parallel_rank} of "
                f"{self.tensor_parallel_size}, and runs on rank {rank} of {size}: build the model after "
                f"initialize_model_parallel"
            )


def _check_ranks(layer: str, group: ProcessGroup) -> None:
    own = dist.get_process_group_ranks(parallel_state.get_tensor_model_parallel_group())
    given = dist.get_process_group_ranks(group)
    if given != own:
        raise ValueError(
            f"tensor_model_parallel_group has the ranks {given}, and a {layer} is divided over the tensor group of "
            f"this rank, {own}: leave it out, or give initialize_model_parallel the size {len(given)}"
        )


def given_device(device: torch.device | str | int | None) -> torch.device | str | int | None:
    """Return ``device``, and ``None`` for ``False``, the default that NxD's guide prints for a row-parallel layer."""
    return None if device is False else device

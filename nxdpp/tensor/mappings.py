"""Differentiable collectives of a tensor group, with the names of NeuronX Distributed.

Each is a pair: an operation of the forward, and the one that its gradient needs. ``(..., H)`` is divided along its
last dimension in the tensor-parallel region, and along ``sequence_dimension`` in the sequence-parallel region::

    mapping                                             forward         backward
    copy_to_tensor_model_parallel_region                -               all-reduce
    reduce_from_tensor_model_parallel_region            all-reduce      -
    scatter_to_tensor_model_parallel_region             own part        all-gather
    gather_from_tensor_model_parallel_region            all-gather      own part
    scatter_to_sequence_parallel_region                 own part        all-gather
    gather_from_sequence_parallel_region                all-gather      reduce-scatter
    reduce_scatter_to_sequence_parallel_region          reduce-scatter  all-gather

NeuronX Distributed has the sequence in dimension 0, ``(S, B, H)``. A model with ``(B, S, H)`` gives
``sequence_dimension=1``. ``process_group`` is the tensor group of this rank by default. ``reduce_dtype`` is the dtype
in which the ranks' tensors are summed, by default their own, which the result has in any case. Sizes that do not divide
raise ``ValueError``. With one rank each mapping returns its input.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from nxdpp.tensor.collectives import all_gather, all_reduce, outside_of_graph, own_part, reduce_scatter, size_of


class _Collective(NamedTuple):
    """A collective along ``dim``, in ``dtype``; plain data, since a traced graph is compared between ranks."""

    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "own_part"]
    dim: int = 0
    dtype: torch.dtype | None = None

    def run(self, tensor: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
        """Run the collective over ``group``; the result has the dtype of ``tensor``."""
        converted = tensor if self.dtype is None else tensor.to(self.dtype)
        if self.kind == "all_reduce":
            return all_reduce(converted, group).to(tensor.dtype)
        function = {"all_gather": all_gather, "reduce_scatter": reduce_scatter, "own_part": own_part}[self.kind]
        return function(converted, self.dim, group).to(tensor.dtype)


class _Mapping(torch.autograd.Function):
    """A collective, and a second one for the gradient."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, there: _Collective | None, back: _Collective | None, group: ProcessGroup | None
    ) -> torch.Tensor:
        """Run ``there``, or return an alias for ``None``; the alias may be changed in place, unlike a view."""
        ctx.back, ctx.group = back, group
        return outside_of_graph(tensor if there is None else there.run(tensor, group))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (gradient,) = gradients
        return gradient if ctx.back is None else ctx.back.run(gradient, ctx.group), None, None, None


def copy_to_tensor_model_parallel_region(
    input_: torch.Tensor, process_group: ProcessGroup | None = None, *, reduce_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the input; its gradient is the sum of all ranks' gradients."""
    return _map(input_, process_group, None, _Collective("all_reduce", dtype=reduce_dtype))


def reduce_from_tensor_model_parallel_region(
    input_: torch.Tensor, process_group: ProcessGroup | None = None, *, reduce_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the sum of all ranks' tensors."""
    return _map(input_, process_group, _Collective("all_reduce", dtype=reduce_dtype), None)


def scatter_to_tensor_model_parallel_region(
    input_: torch.Tensor, process_group: ProcessGroup | None = None
) -> torch.Tensor:
    """Return this rank's part along the last dimension."""
    return scatter_to_tensor_model_parallel_region_with_dim(input_, -1, process_group)


def gather_from_tensor_model_parallel_region(
    input_: torch.Tensor, process_group: ProcessGroup | None = None
) -> torch.Tensor:
    """Return all ranks' parts joined along the last dimension."""
    return gather_from_tensor_model_parallel_region_with_dim(input_, -1, process_group)


def scatter_to_tensor_model_parallel_region_with_dim(
    input_: torch.Tensor, partition_dim: int, process_group: ProcessGroup | None = None
) -> torch.Tensor:
    """Return this rank's part along ``partition_dim``."""
    there, back = _Collective("own_part", partition_dim), _Collective("all_gather", partition_dim)
    return _map(input_, process_group, there, back)


def gather_from_tensor_model_parallel_region_with_dim(
    input_: torch.Tensor, gather_dim: int, process_group: ProcessGroup | None = None
) -> torch.Tensor:
    """Return all ranks' parts joined along ``gather_dim``."""
    there, back = _Collective("all_gather", gather_dim), _Collective("own_part", gather_dim)
    return _map(input_, process_group, there, back)


def scatter_to_sequence_parallel_region(
    input_: torch.Tensor, sequence_dimension: int = 0, process_group: ProcessGroup | None = None
) -> torch.Tensor:
    """Return this rank's part of the sequence, ``(S / ranks, B, H)`` of ``(S, B, H)``."""
    return scatter_to_tensor_model_parallel_region_with_dim(input_, sequence_dimension, process_group)


def gather_from_sequence_parallel_region(
    input_: torch.Tensor,
    sequence_dimension: int = 0,
    to_model_parallel: bool = True,
    process_group: ProcessGroup | None = None,
    *,
    reduce_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the whole sequence, ``(S, B, H)`` of ``(S / ranks, B, H)``.

    With ``to_model_parallel`` each rank uses the result in its own way, as a column-parallel layer does: the gradients
    of all ranks are added up. Without it all ranks do the same with the result.
    """
    if not to_model_parallel:
        return gather_from_tensor_model_parallel_region_with_dim(input_, sequence_dimension, process_group)
    back = _Collective("reduce_scatter", sequence_dimension, reduce_dtype)
    return _map(input_, process_group, _Collective("all_gather", sequence_dimension), back)


def reduce_scatter_to_sequence_parallel_region(
    input_: torch.Tensor,
    sequence_dimension: int = 0,
    process_group: ProcessGroup | None = None,
    *,
    reduce_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return this rank's part of the sequence of the sum of all ranks' tensors."""
    there = _Collective("reduce_scatter", sequence_dimension, reduce_dtype)
    return _map(input_, process_group, there, _Collective("all_gather", sequence_dimension))


def _map(
    input_: torch.Tensor, group: ProcessGroup | None, there: _Collective | None, back: _Collective | None
) -> torch.Tensor:
    if size_of(group) == 1:
        return input_
    mapped: torch.Tensor = _Mapping.apply(input_, there, back, group)  # type: ignore[no-untyped-call]
    return mapped


def _split_along_first_dim(input_: torch.Tensor) -> torch.Tensor:
    # Scripts of NeuronX Distributed take these two from here.
    return own_part(input_, 0)


def _gather_along_first_dim(input_: torch.Tensor) -> torch.Tensor:
    return all_gather(input_, 0)

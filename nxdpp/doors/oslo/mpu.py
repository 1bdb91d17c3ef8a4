"""MPU: OSLO's names for the groups, ranks and sizes of data, tensor and pipeline parallelism."""

import os
from itertools import product

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from nxdpp.agreement.comparison import unequal
from nxdpp.ranks import parallel_state
from nxdpp.tensor.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
)


class MPU:
    """Groups, ranks and sizes of this process.

    The constructor divides the world into groups, and starts ``torch.distributed`` if it does not run; collective over
    all ranks. The data-parallel size is ``world / (tensor_parallel_size * pipeline_parallel_size)``. A second ``MPU``
    of the same sizes is of the same groups.

    Args:
        tensor_parallel_size: number of ranks that share each layer. They are neighbours.
        pipeline_parallel_size: number of ranks in a pipeline.
        master_addr, master_port: address of rank 0 in place of ``MASTER_ADDR`` and ``MASTER_PORT``, as in OSLO only
            where ``torch.distributed`` does not run.

    Raises:
        ValueError: for a size below 1, and a world size that is not a multiple of their product.
        RuntimeError: after model parallelism was initialized with different sizes.
    """

    def __init__(
        self,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        master_addr: str | None = None,
        master_port: int | None = None,
    ) -> None:
        before = {name: os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")}
        if not dist.is_initialized():
            values = zip(before, (master_addr, master_port), strict=True)
            os.environ.update({name: str(value) for name, value in values if value is not None})
        try:
            parallel_state.initialize_model_parallel(tensor_parallel_size, pipeline_parallel_size)
        except BaseException:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
            raise

    def get_data_parallel_group(self) -> ProcessGroup:
        """Return the group of the ranks with this rank's part of the model."""
        return parallel_state.get_data_parallel_group()

    def get_data_parallel_rank(self) -> int:
        """Return this rank's place in its data-parallel group."""
        return parallel_state.get_data_parallel_rank()

    def get_data_parallel_world_size(self) -> int:
        """Return the number of replicas of the model."""
        return parallel_state.get_data_parallel_size()

    def get_tensor_parallel_group(self) -> ProcessGroup:
        """Return the group of the ranks that share each layer with this rank."""
        return parallel_state.get_tensor_model_parallel_group()

    def get_tensor_parallel_rank(self) -> int:
        """Return this rank's place in its tensor-parallel group."""
        return parallel_state.get_tensor_model_parallel_rank()

    def get_tensor_parallel_world_size(self) -> int:
        """Return the number of ranks that share each layer."""
        return parallel_state.get_tensor_model_parallel_size()

    def get_pipeline_parallel_group(self) -> ProcessGroup:
        """Return the group of the ranks of this rank's pipeline, in the order of the stages."""
        return parallel_state.get_pipeline_model_parallel_group()

    def get_pipeline_parallel_rank(self) -> int:
        """Return this rank's place in its pipeline."""
        return parallel_state.get_pipeline_model_parallel_rank()

    def get_pipeline_parallel_world_size(self) -> int:
        """Return the number of ranks in a pipeline."""
        return parallel_state.get_pipeline_model_parallel_size()

    def get_tensor_parallel_src_rank(self) -> int:
        """Return the global rank of the first rank of this rank's tensor-parallel group."""
        return parallel_state.get_tensor_model_parallel_src_rank()

    def get_model_parallel_group(self) -> ProcessGroup:
        """Return the group of the tensor and pipeline ranks of this replica; its first use is collective over it."""
        return parallel_state.get_model_parallel_group()

    def get_model_parallel_rank(self) -> int:
        """Return this rank's place in its model-parallel group."""
        pipeline, tensors = self.get_pipeline_parallel_rank(), self.get_tensor_parallel_world_size()
        return pipeline * tensors + self.get_tensor_parallel_rank()

    def get_model_parallel_world_size(self) -> int:
        """Return the number of ranks that share one replica of the model."""
        return self.get_tensor_parallel_world_size() * self.get_pipeline_parallel_world_size()

    def is_pipeline_first_stage(self) -> bool:
        """Return whether this rank has the first stage of its pipeline."""
        return parallel_state.is_pipeline_first_stage()

    def is_pipeline_last_stage(self) -> bool:
        """Return whether this rank has the last stage of its pipeline."""
        return parallel_state.is_pipeline_last_stage()

    def get_pipeline_parallel_global_ranks_across_all_groups(self) -> list[list[int]]:
        """Return the global ranks of each pipeline, in the order of the stages."""
        return parallel_state.get_pipeline_model_parallel_replica_groups()

    def get_pipeline_model_parallel_global_ranks_per_group(self) -> list[int]:
        """Return the global ranks of this rank's pipeline, in the order of the stages."""
        return dist.get_process_group_ranks(self.get_pipeline_parallel_group())

    def rank2device(self, tp_rank: int, pp_rank: int, dp_rank: int) -> int:
        """Return the global rank at a place of the tensor, pipeline and data dimensions.

        Raises ``ValueError`` for a place outside of them.
        """
        sizes = (getattr(self, f"get_{kind}_parallel_world_size")() for kind in ("pipeline", "data", "tensor"))
        return list(product(*map(range, sizes))).index((pp_rank, dp_rank, tp_rank))

    def model_parallel_is_initialized(self) -> bool:
        """Return whether the groups exist."""
        return parallel_state.model_parallel_is_initialized()

    def destroy_model_parallel(self) -> None:
        """End the groups of all ``MPU`` objects; all ranks must call it."""
        parallel_state.destroy_model_parallel()

    def broadcast(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return ``inputs``; its gradient is the sum over the tensor-parallel ranks."""
        return copy_to_tensor_model_parallel_region(inputs)

    def reduce(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``inputs`` over the tensor-parallel ranks, which all call it; ``inputs`` stays."""
        return reduce_from_tensor_model_parallel_region(inputs)

    def scatter(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return this rank's part ``(..., H / ranks)`` of ``inputs`` ``(..., H)``; the gradient is gathered."""
        return scatter_to_tensor_model_parallel_region(inputs)

    def gather(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the parts ``(..., H / ranks)`` of the tensor-parallel ranks, which all call it, as ``(..., H)``.

        Raises ``ValueError`` on all of them for parts of different shapes.
        """
        found = unequal(tuple(inputs.shape), parallel_state.get_tensor_control_group())
        if found is not None:
            raise ValueError(
                f"ranks {found.ranks[0]} and {found.ranks[1]} gather parts of different shapes, {found.values[0]} and "
                f"{found.values[1]}: pad them to one shape"
            )
        return gather_from_tensor_model_parallel_region(inputs)

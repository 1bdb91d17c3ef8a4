"""MPU: OSLO's names for the groups, ranks and sizes of data, tensor and pipeline parallelism."""

from torch.distributed import ProcessGroup

from nxdpp.ranks import parallel_state


class MPU:
    """Groups, ranks and sizes of this process.

    The constructor divides the world into groups, and starts ``torch.distributed`` if it does not run; collective over
    all ranks. The data-parallel size is ``world / (tensor_parallel_size * pipeline_parallel_size)``. A second ``MPU``
    of the same sizes is of the same groups.

    Args:
        tensor_parallel_size: number of ranks that share each layer. They are neighbours.
        pipeline_parallel_size: number of ranks in a pipeline.

    Raises:
        ValueError: for a size below 1, and a world size that is not a multiple of their product.
        RuntimeError: after model parallelism was initialized with different sizes.
    """

    def __init__(self, tensor_parallel_size: int = 1, pipeline_parallel_size: int = 1) -> None:
        parallel_state.initialize_model_parallel(tensor_parallel_size, pipeline_parallel_size)

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

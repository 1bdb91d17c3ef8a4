"""MPU: OSLO's names for the groups, ranks and sizes of data, tensor and pipeline parallelism."""

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

    get_data_parallel_group = staticmethod(parallel_state.get_data_parallel_group)
    get_data_parallel_rank = staticmethod(parallel_state.get_data_parallel_rank)
    get_data_parallel_world_size = staticmethod(parallel_state.get_data_parallel_size)
    get_tensor_parallel_group = staticmethod(parallel_state.get_tensor_model_parallel_group)
    get_tensor_parallel_rank = staticmethod(parallel_state.get_tensor_model_parallel_rank)
    get_tensor_parallel_world_size = staticmethod(parallel_state.get_tensor_model_parallel_size)
    get_pipeline_parallel_group = staticmethod(parallel_state.get_pipeline_model_parallel_group)
    get_pipeline_parallel_rank = staticmethod(parallel_state.get_pipeline_model_parallel_rank)
    get_pipeline_parallel_world_size = staticmethod(parallel_state.get_pipeline_model_parallel_size)

"""Start of model parallelism for the world that ``TrainingArguments`` has started, and the size of a whole model."""

import torch.distributed as dist
from torch import nn
from transformers import TrainingArguments

from nxdpp.parallel_layers import parallel_state
from nxdpp.parallel_layers.embedding import ParallelEmbedding


def initialize(args: TrainingArguments, ranks: int | None) -> None:
    """Start model parallelism with ``ranks`` in a pipeline, by default all; collective over all ranks.

    Raises ``ValueError`` where it runs with other sizes, or on devices of another kind than those of ``args``.
    """
    is_cpu = args.device.type == "cpu"
    if not parallel_state.model_parallel_is_initialized():
        world = dist.get_world_size() if dist.is_initialized() else int(args.world_size)
        size = world if ranks is None else ranks
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=size, backend="gloo" if is_cpu else None)
    found = parallel_state.get_pipeline_model_parallel_size()
    if ranks is not None and ranks != found:
        raise ValueError(
            f"pipeline_parallel_size={ranks}, and initialize_model_parallel was called with {found}. Leave it out."
        )
    device = parallel_state.local_device()
    if device.type != args.device.type:
        raise ValueError(
            f"the pipeline is on {device}, and TrainingArguments on {args.device}: set use_cpu={device.type == 'cpu'}."
        )


def number_of_parameters(model: nn.Module) -> int:
    """Return the number of parameters beside those of embeddings, of which tensor ranks may each have a part."""
    embeddings = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding | ParallelEmbedding)
        for parameter in module.parameters(recurse=False)
    }
    size = parallel_state.get_tensor_model_parallel_size()
    return sum(
        parameter.numel() * (getattr(parameter, "num_partitions", size) if _is_divided(parameter) else 1)
        for parameter in model.parameters()
        if id(parameter) not in embeddings
    )


def _is_divided(parameter: nn.Parameter) -> bool:
    return bool(getattr(parameter, "tensor_model_parallel", False))

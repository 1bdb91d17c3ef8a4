"""Start of model parallelism for the world that ``TrainingArguments`` has started."""

import torch.distributed as dist
from transformers import TrainingArguments

from nxdpp.parallel_layers import parallel_state


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

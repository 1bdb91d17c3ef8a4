"""Start of model parallelism for the world of ``TrainingArguments``, and the parameters of a model in parts."""

from typing import Any

import torch.distributed as dist
from torch import nn
from transformers import TrainingArguments

from nxdpp.gradients.followed_optimizers import replace_held
from nxdpp.initialization.parts import whole_of
from nxdpp.ranks import parallel_state
from nxdpp.tensor.embedding import ParallelEmbedding
from nxdpp.tensor.tensor_attributes import is_tensor_parallel


def initialize(args: TrainingArguments, ranks: int | None) -> None:
    """Start model parallelism with ``ranks`` in a pipeline, by default all; collective over all ranks.

    Raises ``ValueError`` if it runs with different sizes, or on a different kind of device than ``args``.
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
    """Return the number of parameters without embeddings, counting divided parameters whole."""
    embeddings = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding | ParallelEmbedding)
        for parameter in module.parameters(recurse=False)
    }
    return sum(_whole_number(parameter) for parameter in model.parameters() if id(parameter) not in embeddings)


def _whole_number(parameter: nn.Parameter) -> int:
    """Return the number of elements of the whole that ``parameter`` is a part of."""
    if is_tensor_parallel(parameter):
        ranks = getattr(parameter, "num_partitions", parallel_state.get_tensor_model_parallel_size())
        return parameter.numel() * int(ranks)
    return whole_of(parameter).numel()


def keep_own_parameters(optimizer: Any, model: nn.Module) -> None:
    """Remove the parameters of ``model`` that other ranks have from the groups of ``optimizer``; not collective.

    Empty groups stay. An ``optimizer`` without groups is left as it is.

    A subclass's ``create_optimizer`` may make it over the whole model, after the model is cut::

        groups of the subclass    [a, b]  [c, d]      b and c are other ranks' parameters, on the meta device
        groups afterwards         [a]     [d]
    """
    others = {id(parameter): parameter for parameter in model.parameters() if parameter.is_meta}
    replace_held(optimizer, others, dict.fromkeys(others, ()))

"""Models that a pipeline cannot run: in wrappers of other runtimes, with ties that a move has undone, with experts."""

import sys
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from nxdpp.agreement.same_values import sample
from nxdpp.devices.kinds import device_of
from nxdpp.ground.torch_names import FSDP_MANAGED
from nxdpp.ground.transformers_names import EXPERTS
from nxdpp.pipeline.local.local_module import LocalModule
from nxdpp.pipeline.local.view import LocalView
from nxdpp.tracing.modules import listings

# transformers' name of the implementation that sorts tokens by expert and groups the products.
_GROUPED = "grouped_mm"
_AVERAGED = "run_train averages the gradients of data-parallel replicas itself"


def refuse_other_wrappers(module: nn.Module) -> None:
    """Raise ``ValueError`` for a model in, or with modules in, a wrapper of data parallelism or another pipeline.

    Also for one that transformers has divided.
    """
    for name, child in listings.named_modules(module):
        place = f"{name}, a {type(child).__name__}," if name else f"the model, a {type(child).__name__},"
        if isinstance(child, LocalView | LocalModule):
            raise ValueError(
                f"{place} is a pipeline already. Use it as it is (run_train), or build the model again and wrap the "
                f"outermost module once."
            )
        if isinstance(child, nn.parallel.DistributedDataParallel | nn.DataParallel):
            whole = "give the module inside: model.module" if not name else f"put its .module in the place of {name}"
            raise ValueError(
                f"{place} runs its module as a whole on each rank, and a pipeline cuts it. Take it off: {whole}. "
                f"{_AVERAGED}: ranks beyond pipeline_model_parallel_size are replicas."
            )
        if getattr(child, "is_distributed_loading_by_transformers", False):
            given: Any = getattr(child.config, "distributed_config", None)
            raise ValueError(
                f"{place} is divided by transformers: from_pretrained got a distributed_config with tp_size="
                f"{given.tp_size}, fsdp_size={given.fsdp_size}, ep_size={given.ep_size}. Load it without, and call "
                f"initialize_model_parallel(pipeline_model_parallel_size=..., expert_model_parallel_size="
                f"{given.ep_size}); nxdpp's tensor_parallelize, expert_parallelize and fully_shard divide it."
            )
        if _is_fully_sharded(child):
            raise ValueError(
                f"{place} has parameters that FSDP shards over ranks. Build the model again without fully_shard or "
                f"FullyShardedDataParallel: a rank holds the parameters of its own stages, and {_AVERAGED}."
            )


def refuse_local_wrappers(tree: nn.Module) -> None:
    """Raise ``RuntimeError`` for a module of this rank's ``tree`` that was given to a wrapper of data parallelism."""
    for name, child in listings.named_modules(tree):
        if isinstance(child, nn.parallel.DistributedDataParallel | nn.DataParallel) or _is_fully_sharded(child):
            raise RuntimeError(
                f"{name or 'the model'}, a {type(child).__name__}, is in a wrapper of data parallelism, which would "
                f"wait for other ranks in another order than the stages, or average gradients twice. Leave the wrapper "
                f"out: {_AVERAGED}."
            )


def _is_fully_sharded(module: nn.Module) -> bool:
    # Only a program that uses FSDP has imported it.
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return False
    # FullyShardedDataParallel around a pipelined model marks all modules inside.
    return FSDP_MANAGED.held_by(module) or isinstance(module, (fsdp.FullyShardedDataParallel, fsdp.FSDPModule))


def refuse_lost_ties(root: nn.Module) -> None:
    """Raise ``ValueError`` for a tied weight of ``root`` that is two equal parameters on a lazy device.

    There ``Module.to`` makes a new parameter for each name. The two would be trained apart.
    """
    parameters = dict(listings.named_parameters(root, remove_duplicate=False))
    for prefix, module in listings.named_modules(root):
        if not isinstance(module, PreTrainedModel):
            continue
        for key, source in module.all_tied_weights_keys.items():
            name, first = (f"{prefix}.{each}" if prefix else each for each in (key, source))
            one, other = parameters.get(name), parameters.get(first)
            if one is None or other is None or one is other or not _are_equal_on_lazy_device(one, other):
                continue
            raise ValueError(
                f"{first} and {name} are one weight by the configuration of {type(module).__name__}, and two "
                f"parameters on {one.device}: Module.to() unties weights there. Call tie_weights() of the model after "
                f"it; or wrap the model on the CPU, and call move_model_to_device()."
            )


def _are_equal_on_lazy_device(one: nn.Parameter, other: nn.Parameter) -> bool:
    if one.device != other.device or not device_of(one.device).is_lazy:
        return False
    return (one.shape, one.dtype) == (other.shape, other.dtype) and sample(one) == sample(other)


def refuse_grouped_experts(module: nn.Module, device: torch.device) -> None:
    """Raise ``ValueError`` for experts that use torch's grouped products, if ``device`` does not run them."""
    if device_of(device).runs_grouped_products:
        return
    for name, child in listings.named_modules(module):
        config = getattr(child, "config", None)
        # transformers writes this attribute into experts that it can compute in several ways.
        if hasattr(child, "is_transposed") and EXPERTS.held_by(config) and EXPERTS.of(config) == _GROUPED:
            raise ValueError(
                f"{name or 'the model'}, a {type(child).__name__}, computes its experts by {_GROUPED!r}, which torch "
                f"does not run on {device.type} devices. Call model.set_experts_implementation('batched_mm') "
                f"before the model is wrapped: its shapes do not depend on the data."
            )

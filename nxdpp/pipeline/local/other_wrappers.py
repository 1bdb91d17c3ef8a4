"""Wrappers of other runtimes, around the model or modules in it, which a pipeline cannot run."""

import sys
from typing import Any

from torch import nn

from nxdpp.ground.torch_names import FSDP_MANAGED
from nxdpp.pipeline.local.local_module import LocalModule
from nxdpp.pipeline.local.view import LocalView
from nxdpp.tracing.modules import listings

_AVERAGED = "run_train averages the gradients of data-parallel replicas itself"


def refuse_other_wrappers(module: nn.Module) -> None:
    """Raise ``ValueError`` for a model in, or with modules in, a wrapper of data parallelism or another pipeline."""
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

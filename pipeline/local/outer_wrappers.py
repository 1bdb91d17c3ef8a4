"""Wrappers of other runtimes around a pipelined model, which would train nothing or other numbers.

Each is recognised before it changes anything, by an attribute that it reads or by its hook::

    DistributedDataParallel(model)   reads _ddp_params_and_buffers_to_ignore, see ``view``
    torch.compile(model)             reads _initialize_hook
    fully_shard(model)               registers a hook of torch.distributed.fsdp

``FullyShardedDataParallel`` marks the modules inside instead. The first step finds them, see ``other_wrappers``.
"""

from typing import Any

_AVERAGED = (
    "Leave it out: a rank holds the parameters of its own stages, and run_train averages the gradients over the "
    "data-parallel replicas itself"
)
COMPILED = (
    "torch.compile of a pipelined model would compile nothing: a rank runs its layers one by one, not the forward. "
    "Compile the layers before NxDPPModel(module): for layer in layers: layer.compile()."
)
_SHARDED = f"FSDP would shard this rank's stages over ranks that have others. {_AVERAGED} (ZeRO-1: Zero1Optimizer)."


def refuse_reader(name: str) -> None:
    """Raise ``RuntimeError`` if ``name`` is the attribute that ``torch.compile`` reads of a module."""
    if name == "_initialize_hook":
        raise RuntimeError(COMPILED)


def refuse_hook(hook: Any) -> None:
    """Raise ``RuntimeError`` if ``hook`` is one of FSDP's."""
    if type(getattr(hook, "__self__", None)).__module__.startswith("torch.distributed.fsdp"):
        raise RuntimeError(_SHARDED)

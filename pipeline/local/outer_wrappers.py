"""Wrappers and functions of other runtimes around a pipelined model, which would train nothing or other numbers.

Each is recognised before it changes anything, by an attribute that it reads, by its hook or by what it lists::

    DistributedDataParallel(model)        reads _ddp_params_and_buffers_to_ignore, see ``view``
    torch.compile(model)                  reads _initialize_hook
    transformers.Trainer(model)           reads is_distributed_loading_by_transformers
    fully_shard(model)                    registers a hook of torch.distributed.fsdp
    FullyShardedDataParallel(model)       lists modules() in _get_ignored_modules
    accelerate's prepare(model)           sets forward, for autocast

A list that the program has made before is not recognised. The first step finds modules that
``FullyShardedDataParallel`` has marked, see ``other_wrappers``.
"""

from types import FrameType
from typing import Any

# Python 3.11 runs a comprehension in a frame of its own.
_COMPREHENSIONS = ("<genexpr>", "<listcomp>")
_AVERAGED = (
    "Leave it out: a rank holds the parameters of its own stages, and run_train averages the gradients over the "
    "data-parallel replicas itself"
)
COMPILED = (
    "torch.compile of a pipelined model would compile nothing: a rank runs its layers one by one, not the forward. "
    "Call nxdpp.apply_compile(model) in its place: it compiles the layers, embedding and head of this rank."
)
_TRAINED = (
    "transformers.Trainer would call the forward of a pipelined model. Give the model to "
    "nxdpp.integrations.PipelineTrainer(model, args, ...) instead, not wrapped: it takes Trainer's arguments and wraps."
)
_SHARDED = f"FSDP would shard this rank's stages over ranks that have others. {_AVERAGED} (ZeRO-1: Zero1Optimizer)."


def refuse_reader(name: str) -> None:
    """Raise ``RuntimeError`` if ``name`` is an attribute that ``torch.compile`` or transformers' ``Trainer`` reads."""
    if name == "_initialize_hook":
        raise RuntimeError(COMPILED)
    if name == "is_distributed_loading_by_transformers":
        raise RuntimeError(_TRAINED)


def refuse_hook(hook: Any) -> None:
    """Raise ``RuntimeError`` if ``hook`` is one of FSDP's."""
    if type(getattr(hook, "__self__", None)).__module__.startswith("torch.distributed.fsdp"):
        raise RuntimeError(_SHARDED)


def refuse_lister(frame: FrameType | None) -> None:
    """Raise ``RuntimeError`` if ``frame`` is of a function that takes this rank's part for the whole model.

    ``frame`` takes the parameters or modules from a generator.
    """
    while frame is not None and frame.f_code.co_name in _COMPREHENSIONS:
        frame = frame.f_back
    if frame is None:
        return
    place = frame.f_globals.get("__name__"), frame.f_code.co_name
    if place == ("torch.distributed.fsdp._init_utils", "_get_ignored_modules"):
        raise RuntimeError(_SHARDED)


def refuse_forward(name: str) -> None:
    """Raise ``AttributeError`` if ``name`` is ``forward``, which stages would not call."""
    if name == "forward":
        raise AttributeError(
            "a forward that is set on a pipelined model would never run, since stages run the layers. Leave the model "
            "out of accelerate's prepare(), and call run_train under torch.autocast(device, dtype). Set another "
            "forward on the module before NxDPPModel(module)."
        )

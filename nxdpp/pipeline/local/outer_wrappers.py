"""Wrappers and functions of other runtimes around a pipelined model, which would train nothing or other numbers.

Each is recognised before it changes anything, by its class, by an attribute that it reads, or by its hook::

    DistributedDataParallel(model)        registers the model as its module
    torch.compile(model)                  registers the model as the module of an OptimizedModule
    transformers.Trainer(model)           reads is_distributed_loading_by_transformers
    fully_shard(model)                    registers a hook of torch.distributed.fsdp
    FullyShardedDataParallel(model)       lists modules() in its constructor
    accelerate's prepare(model)           sets forward, for autocast
    AveragedModel(whole).update_parameters(model)    lists modules, for fewer parameters than it has
    zip(copied.parameters(), model.parameters())     lists modules beside a whole copy that it changes: a warning
    loss_fn = lambda y, t: ... + sum(map(norm, model.parameters()))    lists modules in a loss, of one rank's part

A list that the program has made before is not recognised. The first step finds modules that
``FullyShardedDataParallel`` has marked, see ``refused_models``.
"""

import inspect
import logging
import re
from collections.abc import Iterator
from itertools import islice
from types import CodeType, FrameType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.modules import module as registration
from torch.optim.swa_utils import AveragedModel

from nxdpp.pipeline.loss.batch_loss import BatchLoss
from nxdpp.ranks import parallel_state
from nxdpp.tracing.code.frames import outwards
from nxdpp.tracing.models.loss_function import PENALTY_OF_A_PART, LossCall, LossFunction

# The constructor asks by functions of its own.
_DEPTH = 5
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
_AVERAGE = (
    "AveragedModel has {} parameters, and this rank's part of the pipelined model {}: the first ones would be averaged "
    "with these, whatever they are, and the others stay as they are. Copy this rank's part: averaged = "
    "AveragedModel(model.local_module), after each step averaged.update_parameters(model.local_module)."
)
_BESIDE_A_COPY = (
    "the program lists the %d parameters that this rank has of the pipelined model, beside the %d of %r, a copy of the "
    "whole model, and changes values in place. An average (EMA) of these pairs would leave parameters of the copy as "
    "they are, and zip would pair the wrong ones. Copy this rank's part: averaged = copy.deepcopy(model.local_module), "
    "beside model.local_module.parameters() in each step, or AveragedModel(model.local_module)."
)
_BROADCAST = (
    "DistributedDataParallel gives all ranks the parameters of rank 0, which has other layers, or other parts of them: "
    "leave it out. Gradients are averaged over the data-parallel replicas in any case."
)
_BY_REGISTRATION = {"DistributedDataParallel": _BROADCAST, "OptimizedModule": COMPILED}
_views: list[type[nn.Module]] = []
# The code that has listed each part. A look at its variables keeps those of a long-lived function alive: one is enough.
_listing: WeakKeyDictionary[nn.Module, set[CodeType]] = WeakKeyDictionary()
# How such code pairs parameters, and changes them; a comparison of two models changes none.
_PAIRS = {"zip", "named_parameters", "state_dict"}
_CHANGES = {"data", "load_state_dict"} | {
    f"{prefix}{name}_"
    for prefix in ("", "_foreach_")
    for name in ("add", "addcmul", "copy", "div", "lerp", "mul", "sub")
}
_LOSSES = {LossCall.__call__.__code__, LossFunction.loss.__code__, BatchLoss.__call__.__code__}
_logger = logging.getLogger(__name__)


def refuse_as_child(view: type[nn.Module]) -> None:
    """Let a wrapper of torch raise ``RuntimeError`` when it registers a module of the class ``view`` as its own."""
    if not _views:
        registration.register_module_module_registration_hook(_refuse_parent)
    _views.append(view)


def _refuse_parent(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    if isinstance(child, tuple(_views)):
        for kind in type(parent).__mro__:
            if kind.__module__.startswith("torch.") and kind.__name__ in _BY_REGISTRATION:
                raise RuntimeError(_BY_REGISTRATION[kind.__name__])


def refuse_reader(name: str) -> None:
    """Raise ``RuntimeError`` if ``name`` is an attribute that transformers' ``Trainer`` reads."""
    if name == "is_distributed_loading_by_transformers":
        raise RuntimeError(_TRAINED)


def refuse_hook(hook: Any) -> None:
    """Raise ``RuntimeError`` if ``hook`` is one of FSDP's."""
    if type(getattr(hook, "__self__", None)).__module__.startswith("torch.distributed.fsdp"):
        raise RuntimeError(_SHARDED)


def refuse_lister(frame: FrameType | None) -> None:
    """Raise ``RuntimeError`` if ``frame`` lists modules for the constructor of ``FullyShardedDataParallel``."""
    for each in islice(outwards(frame), _DEPTH):
        place = each.f_globals.get("__name__"), each.f_code.co_name
        if place == ("torch.distributed.fsdp.fully_sharded_data_parallel", "__init__"):
            raise RuntimeError(_SHARDED)


def refuse_average(frame: FrameType | None, view: nn.Module) -> None:
    """Raise ``RuntimeError`` if ``frame`` lists ``view`` for an ``AveragedModel`` of other parameters."""
    for each in islice(outwards(frame), _DEPTH):
        if each.f_code is AveragedModel.update_parameters.__code__:
            models = each.f_locals["self"].module, view
            averaged, own = (sum(1 for _ in model.parameters()) for model in models)
            if averaged != own:
                raise RuntimeError(_AVERAGE.format(averaged, own))


def warn_of_whole_copy(frame: FrameType | None, whole: nn.Module | None, part: nn.Module) -> None:
    """Log a warning, once for each place, if the program lists ``part`` beside a copy of the ``whole`` model."""
    while frame is not None and frame.f_globals.get("__name__") == nn.Module.__module__:
        frame = frame.f_back
    if frame is None or whole is None or not _PAIRS & {*frame.f_code.co_names}:
        return
    known = _listing.setdefault(part, set())
    if frame.f_code in known:
        return
    known.add(frame.f_code)
    if not _CHANGES & _names_of(frame.f_code):
        return
    own = sum(1 for _ in part.parameters())
    for name, each in _modules_of(frame):
        if each is whole or type(each) is not type(whole) or not _lists(frame.f_code, name):
            continue
        # Another wrapped model has the parameters of other ranks on the meta device.
        held = [parameter.is_meta for parameter in each.parameters()]
        if own < len(held) and not any(held):
            _logger.warning(_BESIDE_A_COPY, own, len(held), name)
            return


def _names_of(code: CodeType) -> set[str]:
    """The names that ``code`` uses, its comprehensions too."""
    inside = (each for each in code.co_consts if isinstance(each, CodeType) and each.co_name.startswith("<"))
    return {*code.co_names}.union(*map(_names_of, inside))


def _lists(code: CodeType, name: str) -> bool:
    """Return whether the source of ``code`` lists the parameters of a variable or attribute; ``True`` if unknown."""
    try:
        source = inspect.getsource(code)
    except (OSError, TypeError):
        return True
    return re.search(rf"\b{name}\.(\w+\.)?(parameters|named_parameters|state_dict)\(", source) is not None


def _modules_of(frame: FrameType) -> Iterator[tuple[str, nn.Module]]:
    """Modules among the variables of ``frame``, and the attributes of its ``self``, by name."""
    for values in (frame.f_locals, getattr(frame.f_locals.get("self"), "__dict__", {})):
        yield from ((name, value) for name, value in list(values.items()) if isinstance(value, nn.Module))


def refuse_forward(name: str) -> None:
    """Raise ``AttributeError`` if ``name`` is ``forward``, which stages would not call."""
    if name == "forward":
        raise AttributeError(
            "a forward that is set on a pipelined model would never run, since stages run the layers. Leave the model "
            "out of accelerate's prepare(), and call run_train under torch.autocast(device, dtype). Set another "
            "forward on the module before NxDPPModel(module)."
        )


def refuse_penalty(frame: FrameType | None) -> None:
    """Raise ``ValueError`` if ``frame`` lists a rank's part of a model in a loss function, of several ranks."""
    is_in_loss = any(each.f_code in _LOSSES for each in outwards(frame))
    if is_in_loss and parallel_state.get_pipeline_model_parallel_size() > 1:
        raise ValueError(f"{PENALTY_OF_A_PART}.")

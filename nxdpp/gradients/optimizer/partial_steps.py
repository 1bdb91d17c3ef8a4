"""Errors for optimizers whose step over this rank's part of a model is not one process's step.

::

    parameters                            the step may look at             refused
    shards of tensor-parallel layers      one element                      Muon, Adafactor, LAMB, LBFGS, SAM
    rows of fully_shard                   one element                      likewise
    whole tensors of a pipeline's stages  one tensor                       LBFGS, SAM, Prodigy

An optimizer is judged before its first step, and again when it has got another group. Torch's own optimizers are known,
others are tried (``trial_steps``). One that cannot be tried, or draws random numbers, is named in a warning.
"""

import gc
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

from torch import nn, optim
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from nxdpp.gradients.optimizer.trial_steps import repeats_steps, steps_quarters_alike, steps_tensors_alike
from nxdpp.gradients.shards.local_tensors import is_sharded, local_rows
from nxdpp.gradients.state_part import mark_states_of
from nxdpp.gradients.step_hooks import run_before_steps
from nxdpp.ranks import parallel_state

_BY_ELEMENT = (
    *(optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.ASGD, optim.NAdam, optim.RAdam),
    *(optim.RMSprop, optim.Rprop, optim.SGD, optim.SparseAdam),
)
_BY_TENSOR = (optim.Adafactor, optim.Muon)
# Torch has no step of rows: in any way, and of the fused kernel.
_WITHOUT_ROWS, _FUSED_WITHOUT_ROWS = (optim.Rprop, optim.SparseAdam), (optim.Adagrad, optim.SGD)
_RATES = ("params", "param_names", "lr", "initial_lr")

_logger = logging.getLogger(__name__)

Parameters = Callable[[], Iterable[nn.Parameter]]

_stages: list[Parameters] = []
_judged = WeakIdKeyDictionary()


def refuse_partial_steps(of_stages: Parameters | None = None) -> None:
    """Refuse first steps that would be wrong on this rank; ``of_stages`` returns parameters of pipelined models."""
    if not _stages:
        run_before_steps(refuse_partial_step)
        _stages.append(tuple)
    if of_stages is not None and of_stages not in _stages:
        _stages.append(of_stages)


def refuse_partial_step(optimizer: Optimizer) -> None:
    """Raise ``RuntimeError`` if a step of ``optimizer``, or of one that wraps it, would be wrong on this rank."""
    number = len(optimizer.param_groups)
    if _judged.get(optimizer) == number or not parallel_state.model_parallel_is_initialized():
        return
    stages = parallel_state.get_pipeline_model_parallel_size()
    staged = {id(parameter) for each in _stages for parameter in each()} if stages > 1 else set()
    if any(_is_shard(p) or id(p) in staged for group in optimizer.param_groups for p in group["params"]):
        for each in (optimizer, *_wrappers(optimizer)):
            _refuse_wrong(each, staged)
        if optimizer not in _judged:
            mark_states_of(optimizer)
    _judged[optimizer] = number


def _is_shard(parameter: nn.Parameter) -> bool:
    if is_sharded(parameter):
        return True
    is_divided = getattr(parameter, "tensor_model_parallel", False)
    return is_divided and parallel_state.get_tensor_model_parallel_size() > 1


def _wrappers(optimizer: Optimizer) -> list[Optimizer]:
    """Optimizers with ``optimizer`` as an attribute: SAM may change the parameters outside of its own ``step``."""
    # By type: the __class__ of a proxy object may run any code.
    others = [each for each in gc.get_objects() if issubclass(type(each), Optimizer) and each is not optimizer]
    return [each for each in others if any(value is optimizer for value in vars(each).values())]


def _refuse_wrong(optimizer: Optimizer, staged: set[int]) -> None:
    kind = type(optimizer)
    _refuse_without_rows(optimizer)
    # Optimizers of this package are right, or step by another optimizer, as accelerate's do.
    if kind in _BY_ELEMENT or any(each.__module__.startswith(("nxdpp.", "accelerate.")) for each in kind.__mro__):
        return
    tried = set()
    for group in optimizer.param_groups:
        shards = [parameter for parameter in group["params"] if _is_shard(parameter)]
        is_staged = any(id(parameter) in staged for parameter in group["params"])
        # Groups often differ only in their rate.
        options = repr({name: value for name, value in group.items() if name not in _RATES})
        if (bool(shards), is_staged, options) in tried:
            continue
        tried.add((bool(shards), is_staged, options))
        if shards and not _is_right(optimizer, group, steps_quarters_alike):
            raise RuntimeError(_over_shards(kind.__name__, shards))
        if is_staged and kind not in _BY_TENSOR and not _is_right(optimizer, group, steps_tensors_alike):
            raise RuntimeError(_over_stages(kind.__name__))


def _refuse_without_rows(optimizer: Optimizer) -> None:
    kind = type(optimizer)
    for group in optimizer.param_groups:
        is_fused = kind in _FUSED_WITHOUT_ROWS and group["fused"]
        if (is_fused or kind in _WITHOUT_ROWS) and any(map(is_sharded, group["params"])):
            remedy = "leave fused=True out" if is_fused else "take AdamW, Adam or SGD"
            raise RuntimeError(
                f"torch's {kind.__name__}{' with fused=True' if is_fused else ''} cannot step the rows that a rank has "
                f"of the parameters of fully_shard: {remedy}."
            )


def _is_right(optimizer: Optimizer, group: dict[str, Any], alike: Callable[[Optimizer, Any], bool]) -> bool:
    """Return whether a trial shows the steps of whole tensors, or shows nothing. Warns in the second case."""
    try:
        if alike(optimizer, group):
            return True
        if repeats_steps(optimizer, group):
            return False
        reason = "it draws random numbers"
    except Exception as error:
        reason = f"it raises {type(error).__name__}: {error}"
    _warn(type(optimizer).__name__, reason)
    return True


@cache
def _warn(kind: str, reason: str) -> None:
    _logger.warning(
        "%s steps a part of a model on each rank, and trial steps on small tensors tell nothing of it, since %s. Where "
        "its step of an element depends on other tensors or elements, losses are not those of one process. Of these "
        "none does: %s.",
        kind,
        reason,
        _names(_BY_ELEMENT),
    )


def _over_shards(kind: str, shards: Sequence[nn.Parameter]) -> str:
    if any(map(is_sharded, shards)):
        parts = "rows of tensors that fully_shard divides over replicas"
        remedy = "train without fully_shard"
    else:
        ranks = parallel_state.get_tensor_model_parallel_size()
        parts, remedy = f"parts of tensors that {ranks} tensor ranks divide", "take more pipeline stages in their place"
    return (
        f"{kind} computes the step of an element from other elements, and {len(shards)} parameters of a group are this "
        f"rank's {parts} (the first has the shape {tuple(local_rows(shards[0]).shape)}): it would not be the step "
        f"of the whole tensors. Take an optimizer that steps each element by itself: {_names(_BY_ELEMENT)}, or a "
        f"similar one. Or {remedy}."
    )


def _over_stages(kind: str) -> str:
    return (
        f"{kind} computes the step of a parameter from other parameters, and this rank has only those of its part of "
        f"{parallel_state.get_pipeline_model_parallel_size()} pipeline ranks: each rank would make a step of its own. "
        f"Take an optimizer that steps each parameter by itself: {_names(_BY_ELEMENT + _BY_TENSOR)}, or a similar one."
    )


def _names(kinds: Iterable[type[Optimizer]]) -> str:
    return ", ".join(kind.__name__ for kind in kinds)

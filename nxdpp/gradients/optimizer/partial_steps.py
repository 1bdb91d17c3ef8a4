"""Errors for optimizers whose step over this rank's part of a model is not one process's step.

::

    parameters                            the step may look at             refused
    shards of tensor-parallel layers      one element                      Muon, Adafactor, LAMB, LBFGS, SAM
    rows of fully_shard                   one element                      likewise
    experts of expert_parallelize         one element                      likewise
    whole tensors of a pipeline's stages  one tensor                       LBFGS, SAM, Prodigy

An optimizer is judged before its first step, and again when it has got another group: by what is known or declared of
its class (``known_optimizers``). Classes of which nothing is known are refused, with the line that declares them.
"""

import gc
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn, optim
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from nxdpp.counted import counted
from nxdpp.gradients.expert_parameters import is_of_experts
from nxdpp.gradients.optimizer.known_optimizers import Unknown, is_declared, looked_at, names_of
from nxdpp.gradients.optimizer.sent_messages import sends_messages, watch_steps
from nxdpp.gradients.shards.local_tensors import is_sharded, local_rows
from nxdpp.gradients.state_part import mark_states_of
from nxdpp.gradients.step_hooks import run_before_steps
from nxdpp.ranks import parallel_state

# Torch has no step of rows: in any way, and of the fused kernel.
_WITHOUT_ROWS = (optim.Adafactor, optim.Rprop, optim.SparseAdam)
_FUSED_WITHOUT_ROWS = (optim.Adagrad, optim.SGD)

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
    if _is_of_part(optimizer):
        for each in (optimizer, *_wrappers(optimizer)):
            _refuse_wrong(each, optimizer.param_groups)
        mark_states_of(optimizer)
    for group in optimizer.param_groups:
        if any(map(is_sharded, group["params"])):
            _refuse_without_rows(type(optimizer), group)
    _judged[optimizer] = number


def mark_loaded(optimizer: Optimizer) -> None:
    """Make ``optimizer.state_dict()`` return a part, where the state that was loaded is one."""
    if parallel_state.model_parallel_is_initialized() and _is_of_part(optimizer):
        mark_states_of(optimizer)


def _is_of_part(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer`` has parameters of a pipeline's stages, or shards."""
    stages = parallel_state.get_pipeline_model_parallel_size()
    staged = {id(parameter) for each in _stages for parameter in each()} if stages > 1 else set()
    return any(_is_shard(p) or id(p) in staged for group in optimizer.param_groups for p in group["params"])


def _is_shard(parameter: nn.Parameter) -> bool:
    if is_sharded(parameter):
        # One replica has all rows.
        return any(
            each.is_shard() and parameter.device_mesh.size(dim) > 1 for dim, each in enumerate(parameter.placements)
        )
    if is_of_experts(parameter):
        return True
    is_divided = getattr(parameter, "tensor_model_parallel", False)
    return is_divided and parallel_state.get_tensor_model_parallel_size() > 1


def _wrappers(optimizer: Optimizer) -> list[Optimizer]:
    """Optimizers with ``optimizer`` as an attribute: SAM may change the parameters outside of its own ``step``."""
    # By type: the __class__ of a proxy object may run any code.
    others = [each for each in gc.get_objects() if issubclass(type(each), Optimizer) and each is not optimizer]
    return [each for each in others if any(value is optimizer for value in vars(each).values())]


def _refuse_wrong(optimizer: Optimizer, groups: Sequence[dict[str, Any]]) -> None:
    """Raise where ``optimizer``, itself or by one that it wraps, would wrongly step parts of a model in ``groups``."""
    kind = type(optimizer)
    shards = [parameter for group in groups for parameter in group["params"] if _is_shard(parameter)]
    for group in groups:
        of_group = [parameter for parameter in group["params"] if _is_shard(parameter)]
        looks = looked_at(optimizer, group)
        if isinstance(looks, Unknown):
            raise RuntimeError(_not_known(kind, looks, shards))
        if looks == "messages":
            raise RuntimeError(sends_messages(kind.__name__))
        if looks == "all" or (looks == "tensor" and of_group):
            raise RuntimeError(_over_shards(kind, of_group or shards) if shards else _over_stages(kind))
    if is_declared(kind):
        watch_steps(optimizer)


def _refuse_without_rows(kind: type[Optimizer], group: dict[str, Any]) -> None:
    """Raise for steps that take no DTensors: those of bitsandbytes, and some of torch."""
    fused = " with fused=True" if issubclass(kind, _FUSED_WITHOUT_ROWS) and group.get("fused") else ""
    package = "bitsandbytes" if any(each.__module__.startswith("bitsandbytes.") for each in kind.__mro__) else "torch"
    if fused or package == "bitsandbytes" or issubclass(kind, _WITHOUT_ROWS):
        remedy = "leave fused=True out" if fused else "take AdamW, Adam or SGD of torch"
        raise RuntimeError(
            f"{package}'s {kind.__name__}{fused} cannot step the rows that a rank has of the parameters of "
            f"fully_shard: {remedy}."
        )


def _not_known(kind: type[Optimizer], unknown: Unknown, shards: Sequence[nn.Parameter]) -> str:
    ranks = parallel_state.get_pipeline_model_parallel_size()
    parts = _kind_of_shards(shards)[0] if shards else f"layers of its part of {ranks} pipeline ranks"
    or_tensor = "" if shards else ' With looks_at="tensor", other elements of the same parameter may count too.'
    names = names_of("torch", "element") if shards else names_of("torch", "element", "tensor")
    return (
        f"{kind.__name__} {unknown.reason}, and this rank has only {parts}: a step that looks at more, such as one "
        f"that clips by a common norm, or is left out where a gradient is not finite, would be wrong without an error. "
        f"If each element's step follows from its own value, gradient and state alone, write once, before the first "
        f'step: nxdpp.declare_optimizer({kind.__name__}, looks_at="element").{or_tensor} If it looks at more, take an '
        f"optimizer that does not: {names}. Clip by model.clip_grad_norm_(max_norm), and leave a bad step out by "
        f"`if model.clip_grad_norm_(float('inf')).isfinite():`."
    )


def _over_shards(kind: type[Optimizer], shards: Sequence[nn.Parameter]) -> str:
    parts, remedy = _kind_of_shards(shards)
    return (
        f"{kind.__name__} computes the step of an element from other elements, and "
        f"{counted(len(shards), 'parameter of a group is', 'parameters of a group are')} this rank's {parts} (the "
        f"first has the shape {tuple(local_rows(shards[0]).shape)}): it would not be the step of the whole tensors. "
        f"Take an optimizer that steps each element by itself: {names_of('torch', 'element')}, or a similar one. Or "
        f"{remedy}."
    )


def _over_stages(kind: type[Optimizer]) -> str:
    ranks = parallel_state.get_pipeline_model_parallel_size()
    return (
        f"{kind.__name__} computes the step of a parameter from other parameters, and this rank has only those of its "
        f"part of {ranks} pipeline ranks: each rank would make a step of its own. Take an optimizer "
        f"that steps each parameter by itself: {names_of('torch', 'element', 'tensor')}, or a similar one."
    )


def _kind_of_shards(shards: Sequence[nn.Parameter]) -> tuple[str, str]:
    """What ``shards`` are, and how to train without them."""
    if any(map(is_sharded, shards)):
        return "rows of tensors that fully_shard divides over replicas", "train without fully_shard"
    if any(map(is_of_experts, shards)):
        ranks = parallel_state.get_expert_model_parallel_size()
        return f"experts of tensors that {ranks} expert ranks divide", "train without expert_parallelize"
    ranks = parallel_state.get_tensor_model_parallel_size()
    return f"parts of tensors that {ranks} tensor ranks divide", "take more pipeline stages in their place"

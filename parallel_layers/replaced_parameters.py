"""Optimizers that hold parameters which are about to be replaced, or have been, or are of other stages.

Such an optimizer goes on changing parameters that nobody trains: no error, no learning. It is seen at the replacement
where it is there by then; one that is made later, of parameters listed before, at its first step. So is one of the
whole model from before it was wrapped, which keeps in memory what other stages hold.
"""

import gc
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

_replaced = WeakIdKeyDictionary()
"""Parameters that were replaced and that somebody still holds, with their names."""

_step_hook: RemovableHandle | None = None


def check_no_optimizer_holds(parameters: Mapping[str, nn.Parameter], remedy: str) -> None:
    """Raise ``RuntimeError`` where a live optimizer holds one of ``parameters``, which are about to be replaced.

    It names the optimizer's class and the first parameter, and ends with ``remedy``, what to do instead.
    """
    if not parameters or not _holders(parameters):
        return
    # An optimizer that nobody can reach any more may wait for the collector.
    gc.collect()
    holders = _holders(parameters)
    if holders:
        optimizer, names = max(holders, key=lambda holder: len(holder[1]))
        raise RuntimeError(
            f"an optimizer, {type(optimizer).__name__}, holds {len(names)} of the {len(parameters)} parameters that "
            f"are about to be replaced by new ones ({names[0]} is the first) and would go on with the old ones, which "
            f"are not trained. {remedy}"
        )


def watch_replaced(parameters: Mapping[str, nn.Parameter]) -> None:
    """Have an optimizer that steps with one of ``parameters``, which were replaced, raise ``RuntimeError``.

    Costs nothing once they are gone, which is at once where nobody kept them.
    """
    global _step_hook
    for name, parameter in parameters.items():
        _replaced[parameter] = name
    if _step_hook is None and parameters:
        _step_hook = register_optimizer_step_pre_hook(_refuse_replaced)


def _refuse_replaced(optimizer: Optimizer, *_: Any) -> None:
    global _step_hook
    if not len(_replaced):
        if _step_hook is not None:
            _step_hook.remove()
            _step_hook = None
        return
    names = [_replaced[parameter] for parameter in _parameters_of(optimizer) if parameter in _replaced]
    if names:
        raise RuntimeError(
            f"an optimizer, {type(optimizer).__name__}, holds {len(names)} parameters that are not this rank's "
            f"({names[0]} is the first): they were replaced, or are of other stages and kept in memory by it. "
            f"Make it of local_parameters(), after wrapping, loading and move_model_to_device()."
        )


def _holders(parameters: Mapping[str, nn.Parameter]) -> list[tuple[Optimizer, list[str]]]:
    names = {id(parameter): name for name, parameter in parameters.items()}
    # By type: the __class__ of a stranger's proxy may do anything.
    optimizers = [thing for thing in gc.get_objects() if issubclass(type(thing), Optimizer)]
    held = [(o, [names[id(p)] for p in _parameters_of(o) if id(p) in names]) for o in optimizers]
    return [(optimizer, found) for optimizer, found in held if found]


def _parameters_of(optimizer: Optimizer) -> list[Any]:
    # One whose constructor failed has no groups.
    groups = getattr(optimizer, "param_groups", [])
    return [parameter for group in groups for parameter in group["params"]]

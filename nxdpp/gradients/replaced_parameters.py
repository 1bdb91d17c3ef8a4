"""Errors for optimizers that hold replaced parameters, or parameters of other stages.

Without the error such an optimizer would silently update parameters that are no longer trained. An existing optimizer
is found when a parameter is replaced. An optimizer made later, from an old list of parameters, is found at its first
step. An optimizer made before wrapping is found in the first step of the model, before it runs; it would also keep the
parameters of other stages in memory.

Where the program itself has replaced a parameter, one process would go on with the old one without a word. Here it goes
on with a warning.
"""

import gc
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from nxdpp.agreement.fingerprint import canonical
from nxdpp.counted import counted
from nxdpp.gradients.step_hooks import run_before_steps

_logger = logging.getLogger(__name__)

# Names of the replaced parameters that are still referenced; then those that the program has replaced itself.
_replaced = WeakIdKeyDictionary()
_outdated = WeakIdKeyDictionary()

# Entries of a group of an optimizer that differ between the ranks of one script.
_NO_OPTIONS = ("params", "param_names")

_step_check: Callable[[], None] | None = None

# Ids of parameters whose optimizers follow their replacement.
_let_pass: set[int] = set()


def check_no_optimizer_holds(parameters: Mapping[str, nn.Parameter], remedy: str) -> None:
    """Raise ``RuntimeError`` if a live optimizer holds one of ``parameters``, which are about to be replaced.

    The message names the optimizer's class and the first parameter, and ends with ``remedy``.
    """
    # A tied parameter once, by its first name.
    firsts: dict[int, str] = {}
    for name, parameter in parameters.items():
        firsts.setdefault(id(parameter), name)
    parameters = {name: parameters[name] for known, name in firsts.items() if known not in _let_pass}
    found = holders(parameters)
    if found:
        optimizer, names = max(found, key=lambda holder: len(holder[1]))
        raise RuntimeError(
            f"an optimizer, {type(optimizer).__name__}, holds {len(names)} of the "
            f"{counted(len(parameters), 'parameter that is', 'parameters that are')} about to be replaced ({names[0]} "
            f"is the first) and would continue to update the old ones, which are not trained. {remedy}"
        )


@contextmanager
def let_pass(ids: Collection[int]) -> Iterator[None]:
    """Let ``check_no_optimizer_holds`` pass parameters with these ``ids`` inside the block."""
    before = set(_let_pass)
    _let_pass.update(ids)
    try:
        yield
    finally:
        _let_pass.intersection_update(before)


def watch_replaced(parameters: Mapping[str, nn.Parameter]) -> None:
    """Make every optimizer that steps with one of ``parameters``, which were replaced, raise ``RuntimeError``.

    The check of the steps is removed once all replaced parameters are freed.
    """
    _watch(_replaced, parameters)


def warn_of_replaced(parameters: Mapping[str, nn.Parameter]) -> None:
    """Warn once of an optimizer that steps with one of ``parameters``, which the program itself has replaced."""
    _watch(_outdated, parameters)


def note_present(parameters: Iterable[nn.Parameter]) -> None:
    """Take back the warnings of ``parameters``, which the program may have put in their places again."""
    for parameter in parameters:
        _outdated.pop(parameter, None)


def _watch(known: MutableMapping[Any, Any], parameters: Mapping[str, nn.Parameter]) -> None:
    global _step_check
    for name, parameter in parameters.items():
        known[parameter] = name
    if _step_check is None and parameters:
        _step_check = run_before_steps(_refuse_replaced)


def _refuse_replaced(optimizer: Optimizer) -> None:
    global _step_check
    if not len(_replaced) and not len(_outdated):
        if _step_check is not None:
            _step_check()
            _step_check = None
        return
    _check_not_replaced(optimizer)
    old = [_outdated.pop(parameter) for parameter in parameters_of(optimizer) if parameter in _outdated]
    if old:
        _logger.warning(
            "an optimizer, %s, holds %s that the program has replaced in the model (%s is the first): it "
            "does not train the new ones, as in one process. Make it again from the parameters of now.",
            type(optimizer).__name__,
            counted(len(old), "parameter"),
            old[0],
        )


def check_no_optimizer_has(replaced: Mapping[str, nn.Parameter]) -> None:
    """Raise ``RuntimeError`` if a live optimizer holds parameters ``replaced``, which are watched, before it steps."""
    for optimizer, _ in holders(replaced):
        _check_not_replaced(optimizer)


def _check_not_replaced(optimizer: Optimizer) -> None:
    names = [_replaced[parameter] for parameter in parameters_of(optimizer) if parameter in _replaced]
    if names:
        raise RuntimeError(
            f"an optimizer, {type(optimizer).__name__}, holds "
            f"{counted(len(names), 'parameter that is', 'parameters that are')} not this rank's ({names[0]} is the "
            "first): they were replaced, or belong to other stages. Make the optimizer from parameters() of the "
            "wrapped model, after wrapping, loading and move_model_to_device()."
        )


def holders(parameters: Mapping[str, nn.Parameter]) -> list[tuple[Optimizer, list[str]]]:
    """The live optimizers that hold some of ``parameters``, with the parameters' names."""
    if not parameters or not _holders(parameters):
        return []
    # An unreachable optimizer may still wait for the garbage collector.
    gc.collect()
    return _holders(parameters)


def options_text(optimizer: Optimizer, group: Mapping[str, Any]) -> str:
    """Return the class of ``optimizer`` and the options of its ``group``, as text."""
    # Any other object would show its address.
    texts = {
        name: str(value) if isinstance(value, torch.Tensor) else canonical(value)
        for name, value in sorted(group.items())
        if name not in _NO_OPTIONS
    }
    return f"{type(optimizer).__name__}({', '.join(f'{name}={text}' for name, text in texts.items())})"


def parameters_of(optimizer: Optimizer) -> list[Any]:
    """The parameters of all groups. An optimizer whose constructor failed has no groups."""
    groups = getattr(optimizer, "param_groups", [])
    return [parameter for group in groups for parameter in group["params"]]


def live_optimizers() -> list[Optimizer]:
    """All optimizers of this process, in the order in which they were made."""
    found = _optimizers()
    if len(found) > 1:
        # Also those that wait for the garbage collector.
        del found
        gc.collect()
        found = _optimizers()
    return found


def _optimizers() -> list[Optimizer]:
    # By type: the __class__ of a proxy object may run any code.
    return [thing for thing in gc.get_objects() if issubclass(type(thing), Optimizer)]


def _holders(parameters: Mapping[str, nn.Parameter]) -> list[tuple[Optimizer, list[str]]]:
    names = {id(parameter): name for name, parameter in parameters.items()}
    held = [(o, [names[id(p)] for p in parameters_of(o) if id(p) in names]) for o in _optimizers()]
    return [(optimizer, found) for optimizer, found in held if found]

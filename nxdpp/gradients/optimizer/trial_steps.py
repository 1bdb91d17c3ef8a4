"""Trial steps of an optimizer on small tensors, which show what its step looks at together.

::

    one matrix │ its four quarters, each by itself      AdamW alike; Muon, Adafactor and LAMB differ
    two tensors │ each by itself                        Muon and Adafactor alike; LBFGS, SAM and Prodigy differ

A copy of the optimizer steps, with the options of one group and without state and hooks. No optimizer, no parameter
and no random number of the program changes.
"""

import copy
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nxdpp.gradients.step_hooks import no_step_hooks
from nxdpp.ground.torch_names import DYNAMO_CONFIG, TorchDispatchMode

# Some steps look at a whole tensor only after a while (AdaShift after 10), or where gradients become smaller (AdaNorm).
_FEW, _MANY = 5, 30

# A tensor of a trial is given by the numbers of its elements. Values and gradients follow from these.
_MATRIX = torch.arange(24, device="cpu").view(4, 6)
_OTHER = torch.arange(24, 39, device="cpu").view(3, 5)
_QUARTERS = [part for half in _MATRIX.split(2) for part in half.split(3, 1)]
_FLAT_PARTS = _MATRIX.flatten().split([11, 13])
_ELEMENTS = 39


def steps_quarters_alike(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Return whether a matrix gets the step that its quarters get by themselves."""
    return _is_alike(optimizer, group, [_MATRIX], [[part] for part in _QUARTERS])


def steps_flat_parts_alike(optimizer: Optimizer, group: dict[str, Any], device: torch.device) -> bool:
    """Return whether a matrix gets the step that two flat parts of it get by themselves."""
    return _is_alike(optimizer, group, [_MATRIX], [[part] for part in _FLAT_PARTS], device)


def steps_tensors_alike(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Return whether two tensors together get the step that each gets by itself."""
    return _is_alike(optimizer, group, [_MATRIX, _OTHER], [[_MATRIX], [_OTHER]])


def repeats_steps(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Return whether the step draws no random numbers that change it."""
    return torch.equal(*(_changes(optimizer, group, [_MATRIX], _FEW, seed=seed) for seed in (0, 1)))


def _is_alike(
    optimizer: Optimizer,
    group: dict[str, Any],
    together: list[torch.Tensor],
    apart: Sequence[list[torch.Tensor]],
    device: torch.device | str = "cpu",
) -> bool:
    tolerance = 1e-6 if _dtype(device) == torch.float64 else 1e-4
    for steps in (_FEW, _MANY):
        expected = _changes(optimizer, group, together, steps, device)
        found = torch.stack([_changes(optimizer, group, each, steps, device) for each in apart]).sum(0)
        if not torch.allclose(expected, found, rtol=tolerance, atol=tolerance / 100 * float(expected.abs().max())):
            return False
    return True


def _dtype(device: torch.device | str) -> torch.dtype:
    return torch.float64 if torch.device(device).type == "cpu" else torch.float32


def _changes(
    optimizer: Optimizer,
    group: dict[str, Any],
    numbers: Sequence[torch.Tensor],
    steps: int,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> torch.Tensor:
    """The changes of all elements, of shape (_ELEMENTS,), by steps of a copy with tensors of ``numbers``."""
    at = [each.to(device, _dtype(device)) for each in numbers]
    starts = [torch.cos(3.0 * each) for each in at]
    parameters = [nn.Parameter(each.clone()) for each in starts]
    tried = _copy(optimizer, group, parameters)
    # The program may have put a step of its own into the optimizer: schedulers do.
    step: Callable[..., Any] = type(tried).step
    # torch's own wrapper of a step runs hooks.
    step = step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]  # of functools.wraps
    takes_closure = "closure" in inspect.signature(step).parameters
    losses = [partial(_loss, each, parameter) for each, parameter in zip(at, parameters, strict=True)]
    with _no_traces(seed):
        for number in range(steps):
            closure = partial(_backward, parameters, losses, number)
            closure()
            step(tried, closure) if takes_closure else step(tried)
    result = torch.zeros(_ELEMENTS, dtype=torch.float64, device="cpu")
    for each, start, parameter in zip(numbers, starts, parameters, strict=True):
        result[each] = (parameter.detach() - start).to("cpu", torch.float64)
    return result


def _loss(numbers: torch.Tensor, parameter: torch.Tensor, step: int) -> torch.Tensor:
    # It has no minimum, where LBFGS would end from anywhere. Its gradient depends on the values, for SAM.
    return (torch.sin(7.0 * numbers + 0.1 * step) * (parameter + 0.3 * torch.sin(3.0 * parameter))).sum()


@torch.enable_grad()
def _backward(
    parameters: Sequence[nn.Parameter], losses: Sequence[Callable[[int], torch.Tensor]], step: int
) -> torch.Tensor:
    for parameter in parameters:
        parameter.grad = None
    loss = torch.stack([each(step) for each in losses]).sum()
    loss.backward()
    return loss


@contextmanager
def _no_traces(seed: int) -> Iterator[None]:
    """Run the block without hooks of optimizers, messages and compilation; the generator is as before after it."""
    is_imported = DYNAMO_CONFIG.path.rpartition(".")[0] in sys.modules
    compiler = torch.compiler.set_stance("force_eager") if is_imported else nullcontext()
    no_messages: TorchDispatchMode = _NoMessages()  # type: ignore[no-untyped-call]  # torch gives no type
    with torch.random.fork_rng(devices=[]), no_messages, compiler, no_step_hooks():
        torch.default_generator.manual_seed(seed)
        yield


def _copy(optimizer: Optimizer, group: dict[str, Any], parameters: list[nn.Parameter]) -> Optimizer:
    """A copy that holds only ``parameters``, with the options of ``group``, which is a group of ``optimizer``."""
    copied = object.__new__(type(optimizer))
    options: dict[str, Any] = copy.deepcopy({name: value for name, value in group.items() if name != "params"})
    # A warm-up may begin at a rate of zero, with which all optimizers are alike.
    changed = {"lr": max(float(options.get("lr") or 0.0), 0.1), "fused": None, "capturable": False}
    options |= {name: value for name, value in changed.items() if name in options} | {"params": parameters}
    # What the copy has in place of objects of the optimizer, and of an optimizer that it wraps.
    memo: dict[int, Any] = {id(optimizer): copied}
    for each in (optimizer, *(value for value in vars(optimizer).values() if isinstance(value, Optimizer))):
        memo |= {id(each.state): defaultdict(dict), id(each.param_groups): [options]}
        for known in each.param_groups:
            memo |= {id(known): options, id(known["params"]): parameters}
            memo |= dict.fromkeys(map(id, known["params"]), parameters[0])
        memo |= {id(value): type(value)() for name, value in vars(each).items() if name.endswith("_hooks")}
    kept = {name: value for name, value in vars(optimizer).items() if name != "step"}
    vars(copied).update(copy.deepcopy(kept, memo))
    if isinstance(copied, torch.optim.Adagrad):
        # Its constructor makes the state in torch 2.9.
        sums = {each: torch.full_like(each, options["initial_accumulator_value"]) for each in parameters}
        copied.state.update({each: {"step": torch.zeros(()), "sum": made} for each, made in sums.items()})
    return copied


class _NoMessages(TorchDispatchMode):
    """Raises for a message to other ranks, which may not make this trial."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise RuntimeError("a step that sends messages is not tried")
        return func(*args, **(kwargs or {}))

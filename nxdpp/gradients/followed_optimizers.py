"""Optimizers made before a model is divided or cut, which then hold the parameters that it has afterwards.

::

    groups before   [a, b]  [c, d]
    model           a, d replaced by a', d'; b stays; c freed, for it belongs to another rank
    groups after    [a', b]  [d']

Empty groups stay, so that a learning-rate scheduler finds each group in its place.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nxdpp.counted import counted
from nxdpp.gradients.replaced_parameters import holders, let_pass, parameters_of, watch_replaced

_REMEDY = "Make it after the model is divided or cut."


@contextmanager
def followed_by_optimizers(model: nn.Module) -> Iterator[None]:
    """Let the block replace parameters of ``model`` that optimizers hold; these hold the new ones afterwards.

    The parameter of the same name takes the place of the old one, in the same group. A parameter that is missing
    afterwards, or on the meta device without having been there before, leaves its group. Not collective.

    Where the block raises, optimizers stay as they are. One that holds replaced parameters raises at its next step.

    Args:
        model: the whole model, before it is divided or wrapped. The block changes this object.

    Raises:
        ValueError: for an optimizer that has stepped, and for one that keeps parameters elsewhere than in its groups,
            such as ``ZeroRedundancyOptimizer``. Nothing is changed then.
        RuntimeError: after the block, for a held parameter that may have got another name.
    """
    names = _names(model)
    found = holders(dict(model.named_parameters()))
    optimizers = [optimizer for optimizer, _ in found]
    held = {id(p): p for optimizer in optimizers for p in parameters_of(optimizer) if id(p) in names}
    for optimizer in optimizers:
        _check(optimizer, held)
    del found
    was_meta = {key for key, parameter in held.items() if parameter.is_meta}
    known = {name for each in names.values() for name in each}
    try:
        with let_pass(held):
            yield
    except BaseException:
        watch_replaced({names[key][0]: parameter for key, parameter in held.items() if key not in _names(model)})
        raise
    successors = _successors(model, names, held, known, was_meta)
    for optimizer in optimizers:
        replace_held(optimizer, held, successors)


def _names(model: nn.Module) -> dict[int, list[str]]:
    """The names of each parameter, by id."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def _successors(
    model: nn.Module,
    names: Mapping[int, list[str]],
    held: Mapping[int, nn.Parameter],
    known: set[str],
    was_meta: set[int],
) -> dict[int, list[nn.Parameter]]:
    """The successors of each held parameter, by id: several if a tie has ended, and none if it is freed."""
    after = dict(model.named_parameters(remove_duplicate=False))
    present = set(map(id, after.values()))
    renamed = [name for name, parameter in after.items() if name not in known and not parameter.is_meta]
    successors: dict[int, list[nn.Parameter]] = {}
    for key, old in held.items():
        # A parameter that stays may have got another name by a wrapper.
        new = [old] if key in present else [after[name] for name in names[key] if name in after]
        own = {id(each): each for each in new if key in was_meta or not each.is_meta}
        if not new and any(id(after[name]) not in names for name in renamed):
            raise RuntimeError(
                f"{names[key][0]}, which an optimizer holds, is gone, and {renamed[0]} is new: it may be the same "
                f"weight. {_REMEDY}"
            )
        successors[key] = list(own.values())
    return successors


def replace_held(
    optimizer: Any, held: Mapping[int, nn.Parameter], successors: Mapping[int, Sequence[nn.Parameter]]
) -> None:
    """Replace the parameters ``held`` in the groups and the state of ``optimizer`` by their ``successors``, by id.

    Empty groups stay. An ``optimizer`` without groups is left as it is.
    """
    for group in getattr(optimizer, "param_groups", []):
        before = list(group["params"])
        taken = [successors.get(id(old), [old]) for old in before]
        # Another object may have the same list: torch's LBFGS has.
        group["params"][:] = [new for each in taken for new in each]
        if "param_names" in group:
            pairs = zip(group["param_names"], taken, strict=True)
            group["param_names"][:] = [name for name, each in pairs for _ in each]
    for key, old in held.items():
        state = getattr(optimizer, "state", {}).pop(old, None)
        if state is not None:
            for new in successors[key]:
                optimizer.state[new] = {name: _of_shape(value, old, new) for name, value in state.items()}


def _check(optimizer: Optimizer, held: Mapping[int, nn.Parameter]) -> None:
    kind = type(optimizer).__name__
    stepped = [old for old in held.values() if old in optimizer.state and not _is_first(optimizer.state[old], old)]
    if stepped:
        raise ValueError(
            f"an optimizer, {kind}, has stepped, and its state is that of "
            f"{counted(len(stepped), 'whole parameter')} (the first of shape {list(stepped[0].shape)}), about to be "
            f"divided or freed. {_REMEDY}"
        )
    lists = {id(group["params"]) for group in optimizer.param_groups}
    rest = {name: value for name, value in vars(optimizer).items() if name not in ("param_groups", "state")}
    elsewhere = [name for name, value in rest.items() if any(id(p) in held for p in _parameters_in(value, lists))]
    if elsewhere:
        raise ValueError(
            f"an optimizer, {kind}, keeps parameters in {elsewhere[0]}, too, and would continue with those that are "
            f"about to be replaced. {_REMEDY}"
        )


def _is_first(state: Mapping[str, Any], parameter: nn.Parameter) -> bool:
    """Return whether ``state`` is from before the first step: Adagrad makes its sums in the constructor."""
    return all(
        bool((value == value.flatten()[0]).all()) if value.shape == parameter.shape and value.dim() else not value.any()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.numel() and not value.is_meta
    ) and not any(isinstance(value, int | float) and value for value in state.values())


def _of_shape(value: Any, old: nn.Parameter, new: nn.Parameter) -> Any:
    """``value`` of a first state for ``new`` instead of ``old``."""
    if not isinstance(value, torch.Tensor) or value.shape != old.shape or not value.dim():
        return value
    if value.is_meta or not value.numel():
        return torch.empty_like(new, dtype=value.dtype, requires_grad=False)
    return value.flatten()[0].expand(new.shape).clone().to(new.device)


def _parameters_in(value: Any, left_out: set[int]) -> Iterator[nn.Parameter]:
    """The parameters in nested containers of Python; ``left_out`` has ids of containers that are not searched."""
    pending, seen = [value], set(left_out)
    while pending:
        each = pending.pop()
        if isinstance(each, nn.Parameter):
            yield each
        elif id(each) not in seen and isinstance(each, Mapping | list | tuple | set | frozenset):
            seen.add(id(each))
            inner: Iterable[Any] = [*each.keys(), *each.values()] if isinstance(each, Mapping) else each
            pending += inner

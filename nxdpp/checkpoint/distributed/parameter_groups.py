"""Options of an optimizer's parameter groups, with the names of their parameters on all ranks."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from nxdpp.checkpoint.distributed.structured import decoded, encoded
from nxdpp.checkpoint.files.pieces import listed

_SHOWN = 5


class SavedGroup(NamedTuple):
    """A parameter group: its options as JSON, and the names of its parameters."""

    options: dict[str, Any]
    names: list[str]


def names_of_group(optimizer: Optimizer, number: int, names: Mapping[int, str]) -> list[str]:
    """Return the names of a group's parameters.

    Raises ``ValueError`` for parameters that the model lacks, such as parameters of the model before it was wrapped.
    """
    parameters = optimizer.param_groups[number]["params"]
    others = [parameter for parameter in parameters if id(parameter) not in names]
    if others:
        raise ValueError(
            f"param_groups[{number}] has {len(others)} parameters that this rank's part of the model does not have, "
            f"the first of shape {list(others[0].shape)}: make the optimizer after the model is wrapped, with the "
            f"parameters of model=."
        )
    return [names[id(parameter)] for parameter in parameters]


def groups_of(optimizer: Optimizer, names: Mapping[int, str]) -> list[SavedGroup]:
    """Return the groups of ``optimizer`` with this rank's names.

    Raises ``ValueError`` for options that JSON cannot hold, and for parameters of a different model.
    """
    found = []
    for number, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        own = names_of_group(optimizer, number, names)
        found.append(SavedGroup(encoded(options, f"param_groups[{number}]"), own))
    return found


def joined_groups(of_ranks: Sequence[Sequence[SavedGroup]]) -> list[SavedGroup]:
    """Join the groups of all ranks. Raises ``ValueError`` for ranks with different numbers of groups or options."""
    counts = sorted({len(groups) for groups in of_ranks})
    if len(counts) > 1:
        raise ValueError(
            f"optimizers have {counts[0]} to {counts[-1]} parameter groups on different ranks: give every rank the "
            f"same groups, also those without a parameter of the rank."
        )
    joined = []
    for number in range(counts[0]):
        groups = [groups[number] for groups in of_ranks]
        for rank, group in enumerate(groups):
            if group.options != groups[0].options:
                keys = sorted(set(group.options) | set(groups[0].options))
                key = next(key for key in keys if group.options.get(key) != groups[0].options.get(key))
                raise ValueError(
                    f"param_groups[{number}] has {key}={groups[0].options.get(key)} on rank 0 and "
                    f"{group.options.get(key)} on rank {rank}: set the same options on every rank."
                )
        names = {name for group in groups for name in group.names}
        joined.append(SavedGroup(groups[0].options, sorted(names)))
    return joined


def new_options(optimizer: Optimizer, names: Mapping[int, str], saved: Sequence[SavedGroup]) -> list[dict[str, Any]]:
    """Return the options of ``saved`` for each group of ``optimizer``.

    Raises ``ValueError`` for a different number of groups, and for a group whose parameters were in a different group
    or in none: schedulers know groups by their place. Also for an option that is no number where the optimizer has one.
    """
    if len(optimizer.param_groups) != len(saved):
        raise ValueError(
            f"the optimizer has {len(optimizer.param_groups)} parameter groups, and that of the checkpoint "
            f"{len(saved)}: make the optimizer with the groups that were saved."
        )
    place = {name: number for number, group in enumerate(saved) for name in group.names}
    for number in range(len(saved)):
        own = names_of_group(optimizer, number, names)
        missing = [name for name in own if name not in place]
        if missing:
            raise ValueError(
                f"the checkpoint's optimizer did not have {listed(missing, _SHOWN)} of param_groups[{number}]: "
                f"make the optimizer with the parameters that were saved."
            )
        moved = [name for name in own if place[name] != number]
        if moved:
            raise ValueError(
                f"{moved[0]} is in param_groups[{number}], and was in param_groups[{place[moved[0]]}] of the "
                f"checkpoint: make the optimizer with the groups that were saved."
            )
    found = [decoded(group.options) for group in saved]
    for number, (group, options) in enumerate(zip(optimizer.param_groups, found, strict=True)):
        for key, value in options.items():
            if _numbers_in(group.get(key)) and _numbers_in(value) != _numbers_in(group[key]):
                raise ValueError(
                    f"param_groups[{number}] of the checkpoint has {key}={value!r:.100}, and the optimizer "
                    f"{key}={group[key]!r:.100}: make the optimizer with the options that were saved."
                )
    return found


def regrouped(of_ranks: Sequence[Sequence[SavedGroup]], saved: Sequence[SavedGroup]) -> list[SavedGroup]:
    """Return the options of ``saved``, which are of each parameter, in the groups that an optimizer has on all ranks.

    A group without parameters keeps its own options. Raises ``ValueError`` for a group whose parameters had different
    options.
    """
    options = {name: group.options for group in saved for name in group.names}
    found = []
    for number, groups in enumerate(zip(*of_ranks, strict=True)):
        names = sorted({name for group in groups for name in group.names})
        known = [name for name in names if name in options]
        first = options[known[0]] if known else groups[0].options
        for name in known:
            if options[name] != first:
                raise ValueError(
                    f"param_groups[{number}] has {known[0]} and {name}, whose options differ in the checkpoint: "
                    f"{first!r:.200} and {options[name]!r:.200}. Make the optimizer with the groups that were saved."
                )
        found.append(SavedGroup(first, known))
    return found


def check_options(optimizer: Optimizer, saved: Sequence[SavedGroup]) -> None:
    """Raise ``ValueError`` where ``optimizer`` has a number that groups of an unknown class lack, as SGD's momentum."""
    numbers = {key: value for key, value in optimizer.defaults.items() if _numbers_in(value)}
    for number, group in enumerate(saved):
        for key in numbers.keys() - group.options.keys():
            raise ValueError(
                f"param_groups[{number}] of the checkpoint has no {key}, and the optimizer has "
                f"{key}={numbers[key]!r:.100}: make the optimizer that was saved."
            )


def _numbers_in(value: Any) -> int:
    """Count the numbers of ``value``, such as the 2 of Adam's betas; 0 for anything else."""
    several = value if isinstance(value, tuple) else (value,)
    are_numbers = all(isinstance(each, int | float | torch.Tensor) and type(each) is not bool for each in several)
    return len(several) if are_numbers else 0

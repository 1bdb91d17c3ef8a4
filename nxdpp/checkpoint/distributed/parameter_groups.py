"""Options of an optimizer's parameter groups, with the names of their parameters on all ranks."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from nxdpp.checkpoint.distributed.structured import decoded, encoded
from nxdpp.checkpoint.files.pieces import listed
from nxdpp.counted import counted

_SHOWN = 5


class SavedGroup(NamedTuple):
    """A parameter group: its options as JSON, the names of its parameters, and in a save what schedulers have of it.

    ``scheduled`` has values as JSON, by their path in the state of a scheduler.
    """

    options: dict[str, Any]
    names: list[str]
    scheduled: dict[Any, Any] = {}


def names_of_group(optimizer: Optimizer, number: int, names: Mapping[int, str]) -> list[str]:
    """Return the names of a group's parameters.

    Raises ``ValueError`` for parameters that the model lacks, such as parameters of the model before it was wrapped.
    """
    parameters = optimizer.param_groups[number]["params"]
    others = [parameter for parameter in parameters if id(parameter) not in names]
    if others:
        raise ValueError(
            f"param_groups[{number}] has {counted(len(others), 'parameter')} that this rank's part of the model does "
            f"not have, the first of shape {list(others[0].shape)}: make the optimizer after the model is wrapped, "
            "with the parameters of model=."
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


def are_alike(of_ranks: Sequence[Sequence[SavedGroup]]) -> bool:
    """Return whether all ranks have the same groups, each with some of the parameters."""
    first = [group._replace(names=[]) for group in of_ranks[0]]
    return all([group._replace(names=[]) for group in groups] == first for groups in of_ranks)


def joined_groups(of_ranks: Sequence[Sequence[SavedGroup]]) -> list[SavedGroup]:
    """Join the groups of all ranks: by their place where they are alike, and otherwise one rank after the other.

    Groups that differ are of other parameters on each rank, such as of its layers; those without parameters are left
    out then. Raises ``ValueError`` for a parameter that has different options on two ranks.
    """
    if are_alike(of_ranks):
        return [
            groups[0]._replace(names=sorted({name for group in groups for name in group.names}))
            for groups in zip(*of_ranks, strict=True)
        ]
    joined: list[SavedGroup] = []
    known: dict[str, tuple[int, SavedGroup]] = {}
    for rank, groups in enumerate(of_ranks):
        for group in groups:
            for name in group.names:
                _check_same(name, known.setdefault(name, (rank, group)), (rank, group))
            new = [name for name in group.names if known[name][1] is group]
            if new:
                joined.append(group._replace(names=sorted(new)))
    return joined


def _check_same(name: str, one: tuple[int, SavedGroup], other: tuple[int, SavedGroup]) -> None:
    """Raise ``ValueError`` for groups of two ranks, both with the parameter ``name``, whose values differ."""
    for first, second in zip(one[1][::2], other[1][::2], strict=True):
        key = _different(first, second)
        if key is not None:
            raise ValueError(
                f"the parameter group of {name} has {key}={first.get(key)} on rank {one[0]} and {second.get(key)} on "
                f"rank {other[0]}: set the same options on every rank."
            )


def _different(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """The first option that differs; ``None`` for equal ones."""
    return next((key for key in sorted({*one, *other}) if one.get(key) != other.get(key)), None)


def places_of(optimizer: Optimizer, names: Mapping[int, str], saved: Sequence[SavedGroup]) -> list[list[int]]:
    """Return for each group of ``optimizer`` the numbers of the saved groups that its parameters were in.

    A group without a parameter of this rank is the one at its place, if there are as many. Raises ``ValueError`` for a
    parameter that was in none, and for a group whose parameters had different options.
    """
    place = {name: number for number, group in enumerate(saved) for name in group.names}
    found = []
    for number in range(len(optimizer.param_groups)):
        own = names_of_group(optimizer, number, names)
        missing = [name for name in own if name not in place]
        if missing:
            raise ValueError(
                f"the checkpoint's optimizer did not have {listed(missing, _SHOWN)} of param_groups[{number}]: "
                f"make the optimizer with the parameters that were saved."
            )
        for name in own:
            key = _different(saved[place[own[0]]].options, saved[place[name]].options)
            if key is not None:
                values = [saved[place[each]].options.get(key) for each in (own[0], name)]
                raise ValueError(
                    f"param_groups[{number}] has {own[0]} and {name}, whose {key} differs in the checkpoint: "
                    f"{values[0]!r:.100} and {values[1]!r:.100}. Make the optimizer with the groups that were saved."
                )
        at_its_place = [number] if len(saved) == len(optimizer.param_groups) else []
        found.append(sorted({place[name] for name in own}) or at_its_place)
    return found


def new_options(
    optimizer: Optimizer, places: Sequence[Sequence[int]], saved: Sequence[SavedGroup]
) -> list[dict[str, Any]]:
    """Return the saved options for each group of ``optimizer``, which has the ``places`` of ``places_of``.

    They are empty for a group that keeps its own. Raises ``ValueError`` for an option that is no number where the
    optimizer has one.
    """
    found = [decoded(saved[place[0]].options) if place else {} for place in places]
    for number, (group, options) in enumerate(zip(optimizer.param_groups, found, strict=True)):
        for key, value in options.items():
            if _numbers_in(group.get(key)) and _numbers_in(value) != _numbers_in(group[key]):
                raise ValueError(
                    f"param_groups[{number}] of the checkpoint has {key}={value!r:.100}, and the optimizer "
                    f"{key}={group[key]!r:.100}: make the optimizer with the options that were saved."
                )
    return found


def check_divided(of_ranks: Sequence[Sequence[SavedGroup]], saved: Sequence[SavedGroup]) -> list[str]:
    """Check groups of all ranks that divide a saved group: one of its options would replace several.

    Return the names of two parameters with different rates that get one rate, or nothing. Rates may have become equal
    in the training. Raises ``ValueError`` for any other option that differs.
    """
    place = {name: number for number, group in enumerate(saved) for name in group.names}
    first: dict[int, SavedGroup] = {}
    rates: list[str] = []
    for group in (group for groups in of_ranks for group in groups if group.names):
        one = first.setdefault(place.get(group.names[0], -1), group)
        key = _different(*({**each.options, "lr": None, "initial_lr": None} for each in (one, group)))
        if key is not None:
            raise ValueError(
                f"{one.names[0]} and {group.names[0]} are in groups with {key}={one.options.get(key)} and "
                f"{group.options.get(key)}, and were in one group of the checkpoint: make the optimizer with the "
                f"groups that were saved."
            )
        if not rates and one.options.get("lr") != group.options.get("lr"):
            rates = [one.names[0], group.names[0]]
    return rates


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

"""Schedulers of a training, and their values for each parameter group, which follow the groups to any layout.

::

    rank 0   base_lrs [0.1, 0.05]     groups of layers 0, 1 ─┐
    rank 1   base_lrs [0.02, 0.01]    groups of layers 2, 3 ─┴▶ base_lrs [0.1, 0.05, 0.02, 0.01], of four groups

All other state is alike on all ranks, and rank 0 saves its own.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nxdpp.checkpoint.distributed.structured import encoded
from nxdpp.counted import counted
from nxdpp.ground.torch_names import LAST_RATES, SCHEDULERS

_OF_GROUPS = ("base_lrs", "max_lrs", "min_lrs", "lr_lambdas", "base_values", LAST_RATES.name)
"""Keys of lists with a value for each parameter group, in the states of torch's schedulers and of timm's."""
Path = tuple[str | int, ...]


class NamedSchedulers:
    """Several schedulers as one, whose state has theirs by name."""

    def __init__(self, schedulers: Mapping[str, Stateful]) -> None:
        self.schedulers = dict(schedulers)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each by name."""
        return {name: each.state_dict() for name, each in self.schedulers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give each its state, which ``check_names`` has found."""
        for name, each in self.schedulers.items():
            each.load_state_dict(state[name])

    def check_names(self, state: Mapping[str, Any], folder: object) -> None:
        """Raise ``ValueError`` unless ``state`` has the names of these schedulers."""
        if state.keys() != self.schedulers.keys():
            raise ValueError(
                f"the scheduler of {folder} has the state of {', '.join(sorted(map(str, state)))}, and scheduler= has "
                f"{', '.join(sorted(self.schedulers))}: give the schedulers that were saved, by the same names. "
                f"Nothing was loaded."
            )


def each_of(scheduler: Stateful | None) -> dict[Path, Any]:
    """The schedulers in ``scheduler``, by the path of their state in its state."""
    if isinstance(scheduler, NamedSchedulers):
        return {(name,): each for name, each in scheduler.schedulers.items()}
    return {} if scheduler is None else {(): scheduler}


def is_of(scheduler: Any, optimizer: Optimizer) -> bool:
    """Return whether ``scheduler`` sets the rates of ``optimizer``, also by an optimizer around it."""
    given = getattr(scheduler, "optimizer", None)
    return given is optimizer or (given is not None and getattr(given, "optimizer", None) is optimizer)


def scheduled_values(scheduler: Stateful | None, optimizer: Optimizer) -> list[dict[Path, Any]]:
    """For each group of ``optimizer`` the values that schedulers of it have, as JSON by the path of their list."""
    found: list[dict[Path, Any]] = [{} for _ in optimizer.param_groups]
    for path, one in each_of(scheduler).items():
        if not is_of(one, optimizer):
            continue
        for place, values in _lists(one.state_dict(), len(found), path):
            for group, value in zip(found, encoded(values, "scheduler", {}), strict=True):
                group[place] = value
    return found


def rest_of(scheduler: Stateful | None) -> str:
    """All state of ``scheduler`` but its values of groups, as text that can be compared."""
    if scheduler is None:
        return ""
    state = scheduler.state_dict()
    for path, one in each_of(scheduler).items():
        for place, _ in list(_lists(one.state_dict(), None, path)):
            state = _replaced(state, place, None)
    return json.dumps(encoded(state, "scheduler", {}))


def joined_state(state: Any, groups: Sequence[Mapping[Path, Any]]) -> Any:
    """``state`` as JSON, with lists of the values of ``groups``: of one optimizer, in the order of its saved groups.

    Raises ``ValueError`` for values with tensors, which only rank 0 saves.
    """
    for path in [path for path in (groups[0] if groups else {}) if all(path in group for group in groups)]:
        values = [group[path] for group in groups]
        if any(mark in json.dumps(values) for mark in ('"$tensor"', '"$array"')):
            raise ValueError(
                f"the scheduler has tensors in {'.'.join(map(str, path))}, and ranks have groups of their own: keep "
                f"numbers there."
            )
        state = _replaced(state, path, values)
    return state


def placed_state(one: Any, saved: Any, places: Sequence[Sequence[int]], count: int) -> Any:
    """The state ``saved`` of the scheduler ``one``, with its values in the order of the groups of its optimizer.

    ``places`` has the numbers of the saved groups, of ``count``, that each group takes its values from. A group without
    one keeps its own. Raises ``ValueError`` for a group whose parameters had different values.
    """
    own = one.state_dict()
    for path, values in list(_lists(saved, count)):
        kept = _at(own, path)
        new = []
        for number, place in enumerate(places):
            if any(values[each] != values[place[0]] for each in place):
                raise ValueError(
                    f"param_groups[{number}] has parameters whose {path[-1]} of the scheduler differ in the "
                    f"checkpoint: make the optimizer with the groups that were saved."
                )
            if place or (isinstance(kept, list) and len(kept) == len(places)):
                new.append(values[place[0]] if place else kept[number])
        saved = _replaced(saved, path, new)
    return saved


def check_rates(scheduler: Any, state: Mapping[str, Any], folder: object) -> None:
    """Raise ``ValueError`` for the state of another class or for other groups: ``load_state_dict`` takes any."""
    if not isinstance(scheduler, LRScheduler):
        return
    own = scheduler.state_dict()
    theirs, ours = ({key for key in each if not key.startswith("_")} for each in (state, own))
    if theirs != ours:
        raise ValueError(
            f"the scheduler of {folder} has {', '.join(sorted(theirs - ours)) or 'no other state'}, and this "
            f"{type(scheduler).__name__} has {', '.join(sorted(ours - theirs)) or 'no other state'}: make the "
            f"scheduler that was saved, or leave out scheduler=. Nothing was loaded."
        )
    for path, values in _lists(state, None):
        here = _at(own, path)
        # The last rates are overwritten by the next step.
        if path[-1] != LAST_RATES.name and isinstance(here, list) and len(here) != len(values):
            raise ValueError(
                f"the scheduler of {folder} has {counted(len(values), 'value')} in {'.'.join(map(str, path))}, one for "
                f"each parameter group, and this one has {len(here)}: give optimizer= too, or make the optimizer with "
                "the groups that were saved. Nothing was loaded."
            )


def _lists(state: Any, count: int | None, path: Path = ()) -> Iterator[tuple[Path, list[Any]]]:
    """The lists of ``count`` values of groups in ``state``, or of any number, by path."""
    if not isinstance(state, Mapping):
        return
    for key, value in state.items():
        if type(value) is not list:
            continue
        if key in _OF_GROUPS and count in (None, len(value)):
            yield (*path, key), value
        elif key == SCHEDULERS.name:
            for number, inner in enumerate(value):
                yield from _lists(inner, count, (*path, key, number))


def _at(state: Any, path: Path) -> Any:
    """The value at ``path`` of ``state``; ``None`` if it has none."""
    for key in path:
        try:
            state = state[key]
        except (KeyError, IndexError, TypeError):
            return None
    return state


def _replaced(state: Any, path: Path, value: Any) -> Any:
    """A copy of ``state`` with ``value`` at ``path``."""
    first, rest = path[0], path[1:]
    copy: Any = dict(state) if isinstance(state, Mapping) else list(state)
    copy[first] = _replaced(state[first], rest, value) if rest else value
    return copy

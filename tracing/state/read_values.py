"""Plain values that code of the spine reads, also in globals and configurations: a graph belongs to them.

A loss weight may change between two steps (``model.beta = 0.1``, ``CONFIG["beta"] = 0.1``). The trace reads it, so
another value needs another graph. A step compares only the places that the walk over the values has noted::

    walk     spine module ── cfg ── loss ── beta = 0.1      globals of the user's functions
    places   (vars(module), cfg)   (vars(cfg), loss)   (vars(loss), beta)
"""

import logging
import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

from torch import nn

from nxdpp.tracing.code.reads import is_read
from nxdpp.tracing.state.reachable_state import ReachableState
from nxdpp.tracing.state.values_walk import Values, ValuesWalk, is_equal, kept

_logger = logging.getLogger(__name__)

# So many values of the settings are remembered.
_MOST_KNOWN = 256
_MANY = 20


class ReadPlace:
    """Values that are read in one go: the entries of a dict, the items of a list, a cell."""

    def __init__(self, read: Callable[[], Sequence[Any]]) -> None:
        self._read = read
        self._before = [kept(value) for value in read()]

    def is_same(self) -> bool:
        """Return whether all values are as before, by identity, or by value where they are plain."""
        now, before = self._read(), self._before
        if len(now) != len(before):
            return False
        return all(map(operator.is_, now, before)) or all(map(is_equal, now, before))


class ReadValues:
    """The plain values that the code of a spine reads, now and before.

    Args:
        spine: the modules whose ``forward`` is traced.
        find_state: finds the state that code of the user in the spine can reach; ``None`` without such code.

    Attributes:
        objects: the tensors and other whole objects that the code read when ``number`` was last asked for.
    """

    def __init__(self, spine: Sequence[nn.Module], find_state: Callable[[], ReachableState | None]) -> None:
        self._spine = spine
        self._find_state = find_state
        self._places: list[ReadPlace] = []
        self._values: Values = {}
        self.objects: frozenset[Any] = frozenset()
        self._known: dict[frozenset[tuple[str, Any]], int] = {}
        self._unread: set[str | None] = set()
        self._counter = count()
        self._number = -1

    @property
    def number(self) -> int:
        """A number for the present values, equal for equal ones."""
        if self._number < 0 or not all(place.is_same() for place in self._places):
            self._look()
        return self._number

    def _look(self) -> None:
        state = self._find_state()
        found = ValuesWalk(self._spine, state)
        values, self._places = found.values, [ReadPlace(read) for read in found.reads]
        if state is not None:
            self._find_unread(values, state)
        self.objects = frozenset(known for known in found.objects if known[0] not in self._unread)
        before, self._values = self._values, values
        content = self._read_part(values.items())
        number = self._known.pop(content, None)
        if number is None:
            number = next(self._counter)
            if number == _MANY:
                self._warn(before)
        self._number = number
        self._known[content] = self._number
        if len(self._known) > _MOST_KNOWN:
            del self._known[next(iter(self._known))]

    def _find_unread(self, values: Values, state: ReachableState) -> None:
        """Find names of changed values that no code reads: a counter, for example."""
        changed = {value[0] for path, value in values.items() if self._values.get(path, value) != value}
        names = {name for name in changed - self._unread if name is not None and not is_read(name, state.functions)}
        if names:
            self._unread |= names
            self._known = {self._read_part(content): number for content, number in self._known.items()}

    def _read_part(self, values: Iterable[tuple[str, Any]]) -> frozenset[tuple[str, Any]]:
        return frozenset((path, value) for path, value in values if value[0] not in self._unread)

    def _warn(self, before: Values) -> None:
        changed = [path for path, value in self._values.items() if before.get(path) != value]
        _logger.warning(
            "forward reads values that have changed %d times (last %s); each one is traced anew, which takes longer "
            "than a step. Give a number that changes often to forward as an input.",
            _MANY,
            ", ".join(changed[:3]) or "a missing one",
        )

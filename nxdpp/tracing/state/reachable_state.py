"""State in Python objects that the code of the spine can reach, to compare it and to put it back.

::

    class Model(nn.Module):                       reached
        def forward(self, x):
            self.calls += 1                       attribute ``calls`` of the spine's module
            return self.head(x) * scale()         ``scale``: a function of the user
    def scale():
        return TABLE["scale"] + CONFIG.n          the globals ``TABLE`` and ``CONFIG``, attribute ``n``

Code reaches the names in its code objects: globals, closure cells, defaults, and attributes of these names. Code of
torch, transformers, NumPy and the standard library, and the modules below the spine, are not looked into.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from nxdpp.tracing.code.names import is_framework, names_in, names_on_others
from nxdpp.tracing.code.stored_names import stored_names
from nxdpp.tracing.modules import listings
from nxdpp.tracing.state.object_state import MISSING, PLAIN
from nxdpp.tracing.state.state_walk import ANY_ATTRIBUTE, HOOKS, MOST_ITEMS, OF_MODULES, Leaves, StateWalk


@dataclass(frozen=True)
class ChangedState:
    """One place with a different content: its path, the name under which code knows it, and both contents."""

    path: str
    name: str
    before: Any
    after: Any

    @property
    def is_of_values(self) -> bool:
        """``False`` for a new entry of a dict that holds no value, such as a class by its name in a registry."""
        kind = self.after[0] if isinstance(self.after, tuple) else None
        if isinstance(kind, type) and issubclass(kind, dict):
            # Its entries are places too.
            return bool(self.after[1] > MOST_ITEMS)
        if self.before is not MISSING:
            return True
        is_item = self.path.endswith("]")
        return kind in ("a tensor", "an array", "a generator") or (is_item and kind in (int, float, bool, complex))

    def __str__(self) -> str:
        return f"{self.path} ({_shown(self.before)}, then {_shown(self.after)})"


class ReachableState:
    """The state that the code of ``spine``, the modules whose ``forward`` is traced, can reach.

    ``functions`` are the user's that the code may call, ``names`` the attributes and globals in their code, and
    ``asked`` the attributes that they read of objects other than ``self``. ``of_leaves`` has attributes of modules
    below the spine that code names, as module, path and name.
    """

    def __init__(self, spine: Iterable[nn.Module]) -> None:
        self.spine = list(spine)
        self.functions: dict[FunctionType, None] = {}
        self.names = {"forward"}
        self.of_leaves: list[tuple[nn.Module, str, str]] = []
        found = -1
        while found != len(self.functions):
            found = len(self.functions)
            for function in self.snapshot().functions:
                if function not in self.functions:
                    self.functions[function] = None
                    self.names |= names_in(function)
        self.asked = frozenset(name for function in self.functions for name in names_on_others(function))
        # Attributes of leaves that code names; except the ones that a run of the leaf stores.
        own = set(self.spine)
        root = self.spine[0]
        leaves = {part: path for path, part in listings.named_modules(root) if part not in own}
        stored = stored_names(leaves)
        self.of_leaves = [
            (part, f"{type(root).__name__}.{path}.{name}", name)
            for part, path in leaves.items()
            for name in sorted(self.asked & vars(part).keys() - stored.of(part))
            if name not in OF_MODULES
        ]

    def snapshot(self) -> StateWalk:
        """The state as it is now."""
        return StateWalk(self.spine, self.names, self.of_leaves)

    @contextmanager
    def put_back(self) -> Iterator[StateWalk]:
        """Put the state back afterwards, as it is now."""
        self.clear_caches()
        before = self.snapshot()
        try:
            yield before
        finally:
            before.restore()
            self.clear_caches()

    def clear_caches(self) -> None:
        """Empty the caches of ``functools.lru_cache``: their results may be values of a trace."""
        for cache in self.snapshot().caches:
            cache.cache_clear()


def differences(earlier: StateWalk, later: StateWalk) -> list[ChangedState]:
    """The places with a different content in ``later``."""
    paths = dict.fromkeys([*earlier.keys, *later.keys])
    pairs = ((path, earlier.keys.get(path, MISSING), later.keys.get(path, MISSING)) for path in paths)
    return [
        ChangedState(path[0], str(path[1]), before, after)
        for path, before, after in pairs
        if before is not after and before != after
    ]


class DataWalk(StateWalk):
    """The content of the containers and objects in ``values``, by name, without the code of their classes."""

    def __init__(self, values: Mapping[Any, Any]) -> None:
        self._data = values
        super().__init__((), ANY_ATTRIBUTE)

    def _visit_roots(self, spine: Sequence[nn.Module], of_leaves: Leaves) -> None:
        for name, value in self._data.items():
            self._visit(value, str(name), str(name), 0)

    def _visit(self, value: Any, path: str, name: str | None, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            # A change in place is in the tensor itself.
            self.kept.append(value)
            self.keys[path, name] = id(value)
        elif not isinstance(value, type | FunctionType | MethodType | nn.Module):
            super()._visit(value, path, name, depth)


def has_user_code(spine: Iterable[nn.Module]) -> bool:
    """Return whether code of neither torch nor transformers runs in the ``forward`` of the modules ``spine``."""
    modules = list(spine)
    if any("forward" in vars(module) or any(vars(module).get(hooks) for hooks in HOOKS) for module in modules):
        return True
    return any(not is_framework(cls.__module__) for kind in set(map(type, modules)) for cls in kind.__mro__)


def _shown(key: Any) -> str:
    if key is MISSING:
        return "nothing"
    if isinstance(key, str):
        return key
    if not isinstance(key, tuple):
        return "a tensor"
    kind, *rest = key
    if isinstance(kind, type) and rest:
        # Floats are kept as texts.
        shown = str(rest[0]) if kind in (float, complex) else repr(rest[0])
        return shown if kind in PLAIN else f"a {kind.__name__} of {rest[0]}"
    return str(kind)

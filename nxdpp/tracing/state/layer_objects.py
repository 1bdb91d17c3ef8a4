"""Tensors in Python objects that the code of modules below the spine can reach, such as an object that layers share.

::

    layers.1.prev = [layers.0]            forward of layers.1:  self.prev[0].out       reached: layers.1.prev[0].out
    layer.context = SimpleNamespace()     forward:  self.context.value                 reached: layers.1.context.value

Code reaches the names that it loads. Code of torch, transformers, NumPy and the standard library is not looked into.
"""

import ast
from collections import deque
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig

from nxdpp.ground.torch_names import BUFFERS, MODULES, VERSION
from nxdpp.tracing.code.names import names_in
from nxdpp.tracing.modules import listings
from nxdpp.tracing.state.object_state import PLAIN
from nxdpp.tracing.state.state_walk import ANY_ATTRIBUTE, Leaves, NamesOf, StateWalk

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# Objects whose content no module leaves for another one.
_NOT_ENTERED = (nn.Parameter, ModuleType, PreTrainedConfig)


class TensorPlace(NamedTuple):
    """A tensor in an object, with the number of its in-place changes. ``name`` is its name or text key there."""

    tensor: torch.Tensor
    version: int
    path: str
    name: str | None
    in_list: bool = False


class PlainValue(NamedTuple):
    """A number, a text or a similar value in an object. ``name`` is its name or text key there."""

    value: Any
    holder: Any
    path: str
    name: str | None


class Reached(StateWalk):
    """The objects that modules and their code can reach from ``roots``, each with its path.

    ``names`` are the names that the code uses; without them the code of the modules gives them. ``holders`` has mutable
    objects by their id, each with its path, ``places`` tensors by the id of their holder and their place in it, and
    ``plain`` other values without content, in the same way.
    """

    def __init__(
        self, roots: Sequence[tuple[str, Any]], names_of: NamesOf = names_in, names: AbstractSet[str] | None = None
    ) -> None:
        self.names = {"forward"} if names is None else set(names)
        self._roots = roots
        found = -1
        while found != len(self.names):
            found = len(self.names)
            self.holders: dict[int, tuple[Any, str]] = {}
            self.places: dict[tuple[int, str], TensorPlace] = {}
            self.plain: dict[tuple[int, str], PlainValue] = {}
            # An attribute whose name is computed is not looked for: layers keep many for later looks at them.
            super().__init__((), self.names - ANY_ATTRIBUTE, names_of=names_of)
            if names is None:
                self.names.update(*map(names_of, self.functions))

    def _visit_roots(self, spine: Sequence[nn.Module], of_leaves: Leaves) -> None:
        for path, root in self._roots:
            for below, part in listings.named_modules(root) if isinstance(root, nn.Module) else [("", root)]:
                self._visit(part, f"{path}.{below}" if below else path, None, 0)

    def _visit(self, value: Any, path: str, name: str | None, depth: int) -> None:
        place = path.removeprefix(self._owner_path)
        if place.startswith("["):
            name = ast.literal_eval(place[1:-1]) if place[1] in "'\"" else None
        if type(value) in PLAIN:
            self.plain[id(self._owner), place] = PlainValue(value, self._owner, path, name)
        elif isinstance(value, _NOT_ENTERED):
            return
        elif isinstance(value, torch.Tensor):
            self.places[id(self._owner), place] = tensor_place(value, path, name, isinstance(self._owner, list | deque))
            self.holders[id(value)] = value, path
        elif id(value) not in self.holders:
            self.holders[id(value)] = value, path
            self._enter_later(value, path, name, depth)

    def _enter_module(self, module: nn.Module, path: str, name: str | None, depth: int) -> None:
        self._enter_object(module, path, name, depth)
        registries: tuple[dict[str, Any], ...] = (BUFFERS.of(module), MODULES.of(module))
        for items in registries:
            takes_all = items is MODULES.of(module) and isinstance(module, _LISTS)
            named = {key: item for key, item in items.items() if takes_all or key in self.names}
            self._visit_items(named, f"{path}.", "", depth)

    def _runs(self, cls: type[nn.Module]) -> bool:
        return True

    def _note(self, read: Callable[[], Sequence[Any]], restore: Callable[[], Any]) -> None:
        """No content is put back."""


def tensor_place(tensor: torch.Tensor, path: str, name: str | None, in_list: bool = False) -> TensorPlace:
    """The place of ``tensor`` as it is now."""
    return TensorPlace(tensor, -1 if tensor.is_inference() else VERSION.of(tensor), path, name, in_list)

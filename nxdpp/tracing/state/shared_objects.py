"""Tensors and numbers that modules of several stages share through Python objects: a stage must not change them.

::

    layers.1.prev = [layers.0]     stage 0:  layers.0 sets self.out     stage 1:  layers.1 reads self.prev[0].out

Stage 1 has an object of its own, without the change. The first run of a stage finds such changes. A stage may leave
values in such objects for its own later modules: it runs them in order, for one microbatch after another. A number, and
a tensor under a computed key, are refused where the source of other stages' modules reads them without setting them
first (``code/reads.py``).
"""

import functools
import re
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import nn

from nxdpp.ground.torch_names import BUFFERS
from nxdpp.tracing.code.names import loaded_names
from nxdpp.tracing.code.reads import Uses, uses_of_items, uses_of_name
from nxdpp.tracing.modules import listings
from nxdpp.tracing.state.data_changes import same_content
from nxdpp.tracing.state.layer_objects import PlainValue, Reached, TensorPlace, tensor_place
from nxdpp.tracing.state.reachable_state import has_user_code

_MOST_ITEMS_OF_TENSOR = 1 << 20
_Places = dict[tuple[int, str], TensorPlace]


class SharedBuffers:
    """For a buffer with names in several of ``layers``, found while the model is whole: a name of another stage."""

    def __init__(self, root: nn.Module, layers: Mapping[str, int]) -> None:
        names: dict[int, list[tuple[str, int]]] = {}
        for layer, stage in layers.items():
            for name, buffer in listings.named_buffers(root.get_submodule(layer), remove_duplicate=False):
                names.setdefault(id(buffer), []).append((f"{layer}.{name}", stage))
        self.elsewhere: dict[str, str] = {}
        for group in names.values():
            for name, stage in group:
                others = [other for other, of in group if of != stage]
                if others:
                    self.elsewhere[name] = others[0]


class SharedObjects:
    """The tensors that modules of ``stage`` share with others; ``stages`` has the stages of each that runs."""

    def __init__(
        self, root: nn.Module, stages: Mapping[str, set[int]], stage: int, buffers: SharedBuffers | None = None
    ) -> None:
        self._stages = {name: of - {stage} for name, of in stages.items() if of - {stage}}
        self._root = root
        self._shared: list[tuple[str, Any]] = []
        self.names: set[str] = set()
        self._buffers: dict[str, tuple[dict[str, Any], str, str]] = {}
        for name, other in (buffers.elsewhere if buffers else {}).items():
            owner, _, attribute = name.rpartition(".")
            self._buffers[name] = BUFFERS.of(root.get_submodule(owner)), attribute, other
        # ``in_place_guard`` watches the buffers of a module that runs on several stages.
        self._guarded = [
            part for name, of in stages.items() if len(of) > 1 for part in listings.modules(root.get_submodule(name))
        ]
        own = [(name, root.get_submodule(name)) for name, of in stages.items() if stage in of]
        others = [(name, root.get_submodule(name)) for name, of in stages.items() if of - {stage}]
        self.has_user_code = has_user_code(part for _, module in own for part in listings.modules(module))
        if self.has_user_code and others:
            elsewhere = Reached(others, loaded_names)
            here = Reached(own)
            for key, (holder, path) in elsewhere.holders.items():
                if key in here.holders and not isinstance(holder, nn.Parameter):
                    self._shared.append((path, holder))
            self.names = elsewhere.names

    def __bool__(self) -> bool:
        return bool(self._shared or self._buffers)

    def snapshot(self) -> "SharedSnapshot":
        """The tensors as they are now."""
        guarded = {id(buffer) for module in self._guarded for buffer in BUFFERS.of(module).values()}
        reached = Reached(self._shared, loaded_names, self.names) if self._shared else None
        found = {} if reached is None else reached.places
        places = {key: place for key, place in found.items() if id(place.tensor) not in guarded}
        for name, (registry, key, other) in self._buffers.items():
            if (buffer := registry.get(key)) is not None and not buffer.is_meta:
                path = f"{name}, which is also {other}"
                places[id(registry), key] = tensor_place(buffer, path, key)
        return SharedSnapshot(self, places, {} if reached is None else reached.plain)

    def needs_name(self, name: str, holder: Any, is_item: bool) -> bool:
        """Return whether modules of another stage read the attribute or item ``name`` before they set it."""
        classes = {base.__qualname__ for base in type(holder).__mro__}
        return self._is_needed(lambda functions: uses_of_name(functions, name, classes.__contains__, is_item))

    def needs_items(self, path: str) -> bool:
        """Return whether modules of another stage read items of the list or dict with an item at ``path``."""
        holder = re.search(r"(\w+)(?:\[[^]]*\]?)+$", path)
        return holder is not None and self._is_needed(lambda functions: uses_of_items(functions, holder[1]))

    def _is_needed(self, uses: Callable[[list[FunctionType]], Uses]) -> bool:
        for modules in self._functions.values():
            for functions in modules:
                used = uses(functions)
                if used.needs:
                    return True
                if used.sets:
                    break
        return False

    @functools.cached_property
    def _functions(self) -> dict[int, list[list[FunctionType]]]:
        """For each other stage the functions of its modules, in their order."""
        functions: dict[int, list[list[FunctionType]]] = {}
        for name, stages in self._stages.items():
            reached = Reached([(name, self._root.get_submodule(name))])
            for stage in stages:
                functions.setdefault(stage, []).append(list(reached.functions))
        return functions


class SharedSnapshot:
    """Tensors and numbers at one time."""

    def __init__(self, shared: SharedObjects, places: _Places, plain: dict[tuple[int, str], PlainValue]) -> None:
        self._shared = shared
        self._places = places
        self._plain = plain
        self._content = {key: _content(place.tensor) for key, place in places.items()}

    def first_change(self, later: "SharedSnapshot") -> str | None:
        """Return the path of a value that differs in ``later``, or of a tensor that was changed in place."""
        for key, place in later._places.items():
            before = self._places.get(key)
            if before is not None and before.tensor is place.tensor:
                if before.version != place.version or not same_content(self._content[key], later._content[key]):
                    return f"the tensor {place.path}"
            elif self._is_read(place):
                return f"the tensor {place.path}"
        for key, value in later._plain.items():
            if key not in self._places and self._is_another(self._plain.get(key), value) and self._is_needed(value):
                return f"the value {value.path}"
        return None

    def _is_read(self, place: TensorPlace) -> bool:
        """Return whether code may read a new tensor. Additions to a list, or under other keys, may be for the user."""
        if not place.in_list and (not place.path.endswith("]") or place.name in self._shared.names):
            return True
        is_replaced = place.in_list and any(other.path == place.path for other in self._places.values())
        return is_replaced or self._shared.needs_items(place.path)

    @staticmethod
    def _is_another(before: PlainValue | None, now: PlainValue) -> bool:
        if before is None:
            return True
        return type(before.value) is not type(now.value) or repr(before.value) != repr(now.value)

    def _is_needed(self, value: PlainValue) -> bool:
        is_item = value.path.endswith("]")
        if value.name is not None and self._shared.needs_name(value.name, value.holder, is_item):
            return True
        return is_item and self._shared.needs_items(value.path)


def _content(tensor: torch.Tensor) -> Any:
    # A change of ``.data`` leaves the version as it is.
    is_plain = type(tensor) is torch.Tensor and not tensor.is_meta and tensor.layout is torch.strided
    return tensor.detach().clone() if is_plain and tensor.numel() <= _MOST_ITEMS_OF_TENSOR else None

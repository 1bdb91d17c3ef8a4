"""State that a checkpointed layer changes in its forward: a recomputation gets it as the forward had it.

A pipeline runs forwards of later microbatches before a recomputation. For a layer that counts its calls::

    one process, nothing recomputed    F0 (0)  B0      F1 (1)  B1
    first stage                        F0 (0)  F1 (1)  B0 (0)  B1 (1)     the count is 2 afterwards

Each forward notes buffers and attributes of the layer's modules. A recomputation runs on copies, and what it changes is
dropped. Other state (objects, global variables, generators of Python and NumPy) shows in the output. The outputs of
both runs are compared in calls 1, 2, 4, 8, ... of the layer, and after a change of modes; on XLA, where a comparison
would be a graph of its own, they are not.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from nxdpp.devices.kinds import device_of
from nxdpp.ground.torch_names import BUFFERS, VERSION, pytree
from nxdpp.pipeline.torch_checkpoints import inner_checkpoints
from nxdpp.tracing.modules import listings

_MISSING = object()
_OF_TORCH = frozenset(vars(nn.Module()))
_CONTAINERS = (list, dict, set, deque)
# Kernels of accelerators may add in a different order in each run.
_TOLERANCE = 1e-3


class Noted(NamedTuple):
    """State before a forward, by the name of its place.

    ``contents`` are the versions of tensors and the items of containers; ``copies`` has these values as they were.
    """

    values: dict[str, Any]
    contents: dict[str, Any]
    copies: dict[str, Any]


class LayerState:
    """The places of a layer's state, and those among them that its forward has changed.

    Args:
        name: of the layer, for messages.
        layer: the checkpointed module.
    """

    def __init__(self, name: str, layer: nn.Module) -> None:
        self.name = name
        self._layer = layer
        self._calls = 0
        self._modes: list[Any] = []
        self._places: dict[str, tuple[dict[str, Any], str]] = {}
        self._mutable: set[str] = set()
        self._changing: set[str] = set()
        # Nothing is looked at before the first call: a copy of the layer may not be complete.
        self._attributes: list[dict[str, Any]] = []

    def __reduce__(self) -> tuple[type["LayerState"], tuple[str, nn.Module]]:
        # The places of a copy are in the copy of the layer.
        return LayerState, (self.name, self._layer)

    def begin(self) -> bool:
        """Begin a call; return whether the outputs of its two runs are compared."""
        self._calls += 1
        before, self._modes = self._modes, [attributes.get("training") for attributes in self._attributes]
        return self._modes != before or not self._calls & (self._calls - 1)

    def note(self, whole: bool) -> Noted:
        """Note the state before a forward: copies of all tensors and containers, or only of those known to change."""
        if whole:
            self._look()
        values = self._values()
        # A tensor with a graph is a result, which no later forward can use.
        for name in self._changing:
            if isinstance(values[name], torch.Tensor) and values[name].requires_grad:
                del values[name]
        mutable = {name: values[name] for name in self._mutable if name in values and _is_mutable(values[name])}
        wanted = mutable if whole else {name: mutable[name] for name in self._changing if name in mutable}
        return Noted(values, {name: _content(value) for name, value in mutable.items()}, _copied(wanted))

    def settle(self, noted: Noted, whole: bool) -> None:
        """Find the places that a forward has changed since ``noted``."""
        if whole:
            self._look()
        values, contents = noted.values, noted.contents
        now = self._values()
        self._changing.update(name for name, value in now.items() if value is not values.get(name, _MISSING))
        self._changing.update(name for name, content in contents.items() if _content(now[name]) != content)
        if whole:
            # Kernels of batch norms raise no version.
            others = [name for name in noted.copies if name not in self._changing]
            self._changing.update(name for name in others if _differ(noted.copies[name], now[name]))
        self._mutable |= self._changing

    @contextmanager
    def as_noted(self, noted: Noted) -> Iterator[None]:
        """Give the layer the state as ``noted``, and its present state again after the block.

        Raises ``RuntimeError`` for values that were changed without a copy.
        """
        places = {name: self._places[name] for name in self._changing}
        present = {name: registry.get(key, _MISSING) for name, (registry, key) in places.items()}
        before = {name: self._before(name, noted, value) for name, value in present.items()}
        self._put(_copied(before))
        try:
            yield
        finally:
            self._put(present)

    def _before(self, name: str, noted: Noted, present: Any) -> Any:
        if name in noted.copies:
            return noted.copies[name]
        value = noted.values.get(name, present)
        if name in noted.contents and _content(value) != noted.contents[name]:
            raise RuntimeError(
                f"{self.name} has begun to change {name} in place after its first calls, so that a recomputation no "
                f"longer has the values of the forward. {_remedy(self.name)}"
            )
        return value

    def _values(self) -> dict[str, Any]:
        return {name: registry.get(key, _MISSING) for name, (registry, key) in self._places.items()}

    def _put(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            registry, key = self._places[name]
            if value is _MISSING:
                registry.pop(key, None)
            else:
                registry[key] = value

    def _look(self) -> None:
        """Find the places: buffers and attributes of all modules of the layer."""
        modules = listings.named_modules(self._layer)
        found = [(path, registry) for path, module in modules for registry in (BUFFERS.of(module), vars(module))]
        self._attributes = [registry for _, registry in found[1::2]]
        for path, registry in found:
            for key in registry.keys() - _OF_TORCH:
                self._places[f"{path}.{key}" if path else key] = registry, key
        self._mutable |= {name for name, value in self._values().items() if _is_mutable(value)}


class RecomputedCall:
    """A call of a checkpointed layer: first its forward, then its recomputations.

    Args:
        state: of the layer.
        forward: of the layer.

    Attributes:
        is_compared: whether a recomputation is compared with the forward. It must not stop early then.
    """

    def __init__(self, state: LayerState, forward: Callable[..., Any]) -> None:
        self.is_compared = state.begin()
        self._state = state
        self._forward = forward
        self._noted: Noted | None = None
        self._sums: list[torch.Tensor] = []

    def __call__(self, _: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run the forward. Raises ``RuntimeError`` for a recomputation with a different output."""
        if self._noted is None:
            self._noted = self._state.note(self.is_compared)
            output = self._run(args, kwargs)
            self._state.settle(self._noted, self.is_compared)
            if self.is_compared:
                self._sums = _sums(output)
            return output
        with self._state.as_noted(self._noted):
            output = self._run(args, kwargs)
        if self.is_compared:
            self._compare(_sums(output))
        return output

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with inner_checkpoints(self._with_present_state):
            return self._forward(*args, **kwargs)

    def _with_present_state(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` for a later call in the layer's present state."""
        noted = self._state.note(self.is_compared)

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._state.as_noted(noted):
                return function(*args, **kwargs)

        return call

    def _compare(self, sums: list[torch.Tensor]) -> None:
        for before, now in zip(self._sums, sums, strict=False):
            (total, size), (total_now, size_now) = before.tolist(), now.tolist()
            allowed = 0.0 if before.device.type == "cpu" else _TOLERANCE * size
            if abs(total - total_now) > allowed or abs(size - size_now) > allowed:
                raise RuntimeError(
                    f"{self._state.name} has a different output in its recomputation than in its forward, with a sum "
                    f"of {total_now:.9g} in place of {total:.9g}. It depends on something that changes from call to "
                    f"call and is neither a buffer nor an attribute of a module: an object, a global variable, random "
                    f"numbers of Python or NumPy. {_remedy(self._state.name)}"
                )


def _remedy(name: str) -> str:
    return f"Keep the activations of {name}: name only other layers in nxdpp.apply_checkpoint(model, [...])."


def _sums(output: Any) -> list[torch.Tensor]:
    """The sum and the sum of magnitudes of each floating tensor of ``output``, of shape (2,); none on a lazy device."""
    leaves = [leaf.detach() for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    dtype = torch.float64
    return [
        torch.stack([leaf.sum(dtype=dtype), torch.linalg.vector_norm(leaf, 1, dtype=dtype)])
        for leaf in leaves
        if leaf.is_floating_point() and not leaf.is_meta and not device_of(leaf.device).is_lazy
    ]


def _is_mutable(value: Any) -> bool:
    return isinstance(value, _CONTAINERS) or (isinstance(value, torch.Tensor) and not value.requires_grad)


def _content(value: Any) -> Any:
    """What differs after a change in place."""
    if isinstance(value, torch.Tensor):
        return None if value.is_inference() else VERSION.of(value)
    if isinstance(value, dict):
        return [*map(id, value), *map(id, value.values())]
    return list(map(id, value)) if isinstance(value, _CONTAINERS) else None


def _differ(one: Any, other: Any) -> bool:
    """Return whether two tensors may differ. On a lazy device the comparison would be a graph."""
    if type(one) is not torch.Tensor or type(other) is not torch.Tensor or one.is_meta:
        return False
    return device_of(one.device).is_lazy or not torch.equal(one, other)


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of tensors and containers; one copy of a value that has several names."""
    copies = {id(value): _copy(value) for value in values.values() if _is_mutable(value)}
    return {name: copies.get(id(value), value) for name, value in values.items()}


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value)

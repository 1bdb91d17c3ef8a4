"""Layers in a wrapper that hands keyword arguments on by position, as ``CheckPointWrapper`` of NxD's guide does.

::

    stage    wrapper(hidden, attention_mask=m, position_ids=p)
    wrapper  layer(hidden, m, p)                                     in the order of the call
    layer    forward(hidden, attention_mask=m, position_ids=p)       with the names of the call again

The forward of the wrapper shows it: the layer gets the very values of the call. In a recomputation it gets as many.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from nxdpp.counted import counted
from nxdpp.tracing.modules import listings


def follow_wrapped(root: nn.Module, replaced: Mapping[str, nn.Module]) -> None:
    """Give each of the ``replaced`` modules the names of its arguments, where what took its place has it inside."""
    for name, layer in replaced.items():
        wrapper = root.get_submodule(name)
        if any(module is layer for module in listings.modules(wrapper)):
            _HandedOn(type(wrapper).__name__, wrapper, layer)


class _HandedOn:
    """The names that ``layer`` gets of the arguments of the calls of ``wrapper``."""

    def __init__(self, kind: str, wrapper: nn.Module, layer: nn.Module) -> None:
        self._kind = kind
        # Of the call that runs; ``None`` in a recomputation.
        self._call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        # Names that the last arguments may have after the calls so far, by the number of all; ``()`` has none.
        self._names: dict[int, set[tuple[str, ...]]] = {}
        wrapper.register_forward_pre_hook(self._begin, with_kwargs=True)
        wrapper.register_forward_hook(self._end, always_call=True)
        layer.register_forward_pre_hook(self._name, with_kwargs=True)

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._call = args, kwargs

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._call = None

    def _name(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments by name; ``None`` for a call that names them itself."""
        if kwargs:
            return None
        if self._call is not None:
            self._note(args, *self._call)
        names = max(self._names.get(len(args), {()}), key=len)
        if not names:
            return None
        start = len(args) - len(names)
        return args[:start], dict(zip(names, args[start:], strict=True))

    def _note(self, args: tuple[Any, ...], positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        expected = (*positional, *named.values())
        is_in_order = len(args) == len(expected) and all(a is b for a, b in zip(args, expected, strict=True))
        names = tuple(named) if is_in_order else ()
        possible = {names}
        if len(set(map(id, named.values()))) < len(named):
            # Values that are one object, such as None, are in order in the wrapper's own order too.
            possible.add(())
        earlier = self._names.setdefault(len(args), possible)
        if not earlier & possible:
            before = max(earlier, key=len)
            raise RuntimeError(
                f"{self._kind} hands {counted(len(args), 'argument')} on by position, which had the names "
                f"{list(before)} in an earlier step and {list(names)} in this one: a recomputation "
                f"could not tell them apart. Hand keyword arguments on by name, or use nxdpp.apply_checkpoint(model)."
            )
        self._names[len(args)] = earlier & possible

"""Tensors that tell which modules they follow from, and tensors whose values only another rank has.

The spine of a model (the code above its layers) runs as it is on every rank, on ordinary tensors where the rank knows
the values, and on ``AbsentTensor`` objects where it does not::

    hidden = self.embed_tokens(ids)      absent on a rank without the embedding: zeros in the right shape
    hidden = hidden * self.scale         absent too: it follows from the embedding
    hidden = layer(hidden)               received, if a module of this rank needs it
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch

from nxdpp.ground.torch_names import STORAGE_ADDRESS
from nxdpp.pipeline.local.elsewhere_tensors import ElsewhereTensor

Root = tuple[str, int, int]
"""A tensor that a module returns: the module's name, the number of its call in the forward, and of the tensor."""

# Their results have values of their own.
_NEW = frozenset(
    {"new_zeros", "new_ones", "new_full", "new_empty", "zeros_like", "ones_like", "full_like", "empty_like"}
)
# They would read values that are not there.
_READS = frozenset({"__bool__", "__int__", "__float__", "__index__", "__contains__", "item", "tolist", "numpy"})
_READS |= {"equal", "allclose", "is_nonzero", "__array__", "__dlpack__", "__complex__"}
# The shapes of their results would follow from values.
_READS |= {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"}
_IN_PLACE = frozenset(
    f"__i{name}__"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
) | {"__setitem__", "__set__"}

_MASKS = (torch.bool, torch.uint8)


class TrackedTensor(torch.Tensor):
    """A tensor with its values, and ``roots``: the results of modules that it follows from.

    ``touched`` gets the roots of all tensors that code above the layers computes with.
    """

    roots: frozenset[Root]
    touched: set[Root] | None = None
    same_memory: list["weakref.ref[TrackedTensor]"]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call ``func``; its tensors follow from the roots of all arguments.

        A tensor that is written into follows from the roots of what is written, as do tensors that share its memory.

        Raises ``RuntimeError`` for code that writes into an ordinary tensor, or that reads values of an absent one.
        """
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        tensors = [leaf for leaf in leaves_in((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        tracked = [tensor for tensor in tensors if isinstance(tensor, TrackedTensor)]
        touched = tracked[0].touched
        absent = [tensor for tensor in tracked if isinstance(tensor, AbsentTensor)]
        if touched is not None:
            touched.update(*(tensor.roots for tensor in tracked))
        read = absent if name in _READS else _sizes(name, args, kwargs)
        if read:
            raise unknown_values(read[0].roots, f"reads its values ({name})")
        roots = frozenset().union(*(tensor.roots for tensor in tracked))
        kind = AbsentTensor if absent else TrackedTensor
        is_write = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
        written = kwargs.get("out", tensors[0] if is_write else None)
        if written is not None:
            if not isinstance(written, TrackedTensor):
                raise unknown_values(roots, f"writes it into another tensor ({name})")
            written.follow(roots, kind)
        if any(isinstance(tensor, ElsewhereTensor) for tensor in tensors):
            args, kwargs = _call_untracked(mapped, lambda leaf: _with_memory(leaf, tracked[0]), (args, kwargs))

        def call() -> Any:
            result = func(*args, **kwargs)
            if name in _NEW or not isinstance(result, torch.Tensor | tuple | list):
                return result
            memories = {_memory(tensor): tensor for tensor in tracked}
            return mapped(lambda leaf: tracked_as(leaf, roots, kind, touched, memories.get(_memory(leaf))), result)

        return _call_untracked(call)

    def follow(self, roots: frozenset[Root], kind: type["TrackedTensor"]) -> None:
        """Follow from ``roots`` too, without values if they have none; tensors in the same memory do as well."""
        for each in self.same_memory:
            if (other := each()) is not None:
                other.roots |= roots
                if kind is AbsentTensor and type(other) is TrackedTensor:
                    other.__class__ = AbsentTensor  # a class of the same layout


class AbsentTensor(TrackedTensor):
    """A tensor whose values another rank has: zeros in its shape and dtype, on the device of this rank."""


class ShapelessTensor(AbsentTensor):
    """A tensor of which this rank does not know the shape either; code may only hand it on."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> NoReturn:
        """Raise ``RuntimeError``."""
        name = getattr(func, "__name__", "")
        roots = roots_of(leaf for leaf in leaves_in((args, dict(kwargs or {}))))
        raise unknown_values(roots, f"computes with it ({name})")


def leaves_in(value: Any) -> Iterator[Any]:
    """The values in tuples, lists and dicts."""
    if isinstance(value, tuple | list):
        for each in value:
            yield from leaves_in(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from leaves_in(each)
    else:
        yield value


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with ``function`` applied to each value in its tuples, lists and dicts."""
    if isinstance(value, tuple | list):
        made = [mapped(function, each) for each in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    if isinstance(value, dict):
        items = {key: mapped(function, each) for key, each in value.items()}
        # An output of transformers has fields.
        return items if type(value) is dict else type(value)(**items)
    return function(value)


def tracked_as(
    value: Any,
    roots: frozenset[Root],
    kind: type[TrackedTensor] = TrackedTensor,
    touched: set[Root] | None = None,
    source: TrackedTensor | None = None,
) -> Any:
    """Return a tensor ``value`` as one that follows from ``roots``; other values as they are.

    ``source`` is a tensor in the memory of ``value``, if there is one.
    """
    if type(value) is not torch.Tensor:
        return value
    made = value.as_subclass(kind)
    made.roots, made.touched = roots, touched
    made.same_memory = [] if source is None else source.same_memory
    made.same_memory.append(weakref.ref(made))
    return made


def untracked(value: Any) -> Any:
    """Return a tensor with known values as an ordinary one; other values as they are."""
    if type(value) is not TrackedTensor:
        return value
    return _call_untracked(value.as_subclass, torch.Tensor)


def roots_of(values: Iterable[Any]) -> frozenset[Root]:
    """The roots of all tensors among ``values``."""
    return frozenset().union(*(value.roots for value in values if isinstance(value, TrackedTensor)))


def unknown_values(roots: Iterable[Root], reason: str) -> RuntimeError:
    """The error for code that needs values which only another rank has."""
    names = ", ".join(sorted({name for name, _, _ in roots}))
    return RuntimeError(
        f"generate over a pipeline: code above the layers takes a result of {names}, which another rank runs, and "
        f"{reason}. Generate in one process: model.save_pretrained(directory) on every rank, then "
        f"from_pretrained(directory).generate(...)."
    )


def _call_untracked(function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function`` with tracked tensors taken for ordinary ones: the method of ``torch.Tensor`` does so."""
    return torch.Tensor.__torch_function__(function, (), args)  # type: ignore[no-untyped-call]  # torch has no types


def _with_memory(leaf: Any, like: torch.Tensor) -> Any:
    if not isinstance(leaf, ElsewhereTensor):
        return leaf
    if not isinstance(like, AbsentTensor):
        raise unknown_values(getattr(like, "roots", ()), f"computes with {leaf.held_as}")
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device=like.device)


def _sizes(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[AbsentTensor]:
    """The absent tensors among the arguments of a call whose values decide the shape of its result."""
    if name in ("where", "repeat_interleave"):
        given = [*args, *kwargs.values()]
        repeats = given if len(given) == 1 else given[1:2] if name == "repeat_interleave" else []
        return [each for each in repeats if isinstance(each, AbsentTensor)]
    if name not in ("__getitem__", "__setitem__"):
        return []
    indices = args[1] if isinstance(args[1], tuple) else (args[1],)
    bounds = [bound for each in indices if isinstance(each, slice) for bound in (each.start, each.stop, each.step)]
    masks = [each for each in leaves_in(indices) if isinstance(each, AbsentTensor) and each.dtype in _MASKS]
    return [*masks, *(bound for bound in bounds if isinstance(bound, AbsentTensor))]


def _memory(value: Any) -> int | None:
    return STORAGE_ADDRESS.of(value.untyped_storage()) if isinstance(value, torch.Tensor) else None

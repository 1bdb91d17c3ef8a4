"""Calls of modules in a forward, as a rank knows them: who runs them, and who needs their results."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import Cache

from nxdpp.counted import counted
from nxdpp.generation.absent import AbsentTensor, Root, ShapelessTensor, leaves_in, tracked_as
from nxdpp.generation.caches import CacheUpdate

CACHE = "nxdpp: the cache"
"""It stands for the cache among the values that a module returns."""


_PLAIN = (bool, int, float, str, type(None))
_MOST_SHAPES = 1024
REMEDY = "Generate in one process: model.save_pretrained(directory) on every rank, then from_pretrained(directory)."
"""The remedy for a model that a pipeline cannot generate from."""


@dataclass(frozen=True)
class OutputRule:
    """Layout of a tensor that a module returns, for ranks without its values.

    ``follows`` are the dimensions that the first argument has too. ``has_shape``: all dimensions but the last do.
    """

    size: tuple[int, ...]
    dtype: torch.dtype
    follows: tuple[bool, ...]
    has_shape: bool

    def placeholder(self, first: torch.Tensor | None, root: Root, device: torch.device) -> torch.Tensor:
        """Return the tensor without values, for the present ``first`` argument of the module."""
        kind = AbsentTensor if self.has_shape and type(first) is not ShapelessTensor else ShapelessTensor
        size = self.size_for(first) if kind is AbsentTensor else ()
        made: torch.Tensor = tracked_as(torch.zeros(size, dtype=self.dtype, device=device), frozenset({root}), kind)
        return made

    def size_for(self, first: torch.Tensor | None) -> tuple[int, ...]:
        """The size of the tensor, for the present ``first`` argument of the module."""
        present = self.size if first is None else first.shape
        return tuple(present[i] if same else self.size[i] for i, same in enumerate(self.follows))


@dataclass
class KnownCall:
    """A call of a module in a forward: who runs it, what it does to the cache, and who needs which of its tensors.

    ``shapes`` are sizes and strides by the number of a tensor, and by the signature of the forward.
    """

    home: int
    executors: frozenset[int]
    template: Any
    updates: Sequence[CacheUpdate] = ()
    wanted: dict[int, set[int]] = field(default_factory=dict)
    shapes: dict[int, dict[Any, tuple[list[int], list[int]]]] = field(default_factory=dict)

    @property
    def rules(self) -> list[OutputRule]:
        """Layouts of the tensors of the output."""
        return [each for each in leaves_in(self.template) if isinstance(each, OutputRule)]

    def check(self, name: str, output: Any, first: torch.Tensor | None) -> list[torch.Tensor]:
        """Return the tensors of ``output``.

        Raises ``RuntimeError`` if other ranks expect different values, or different sizes or dtypes of tensors.
        """
        expected = [each for each in leaves_in(self.template) if not isinstance(each, OutputRule)]
        others = [each for each in leaves_in(output) if not isinstance(each, torch.Tensor)]
        tensors = [each for each in leaves_in(output) if isinstance(each, torch.Tensor)]
        if len(others) != len(expected) or len(tensors) != len(self.rules):
            found = f"{counted(len(tensors), 'tensor')} and {counted(len(others), 'other value')}"
            raise _unexpected(name, found, f"{len(self.rules)} and {len(expected)}")
        for value, known in zip(others, expected, strict=True):
            if isinstance(known, _PLAIN) and not isinstance(value, Cache) and value != known:
                raise _unexpected(name, repr(value), repr(known))
        for tensor, rule in zip(tensors, self.rules, strict=True):
            if (rule.has_shape and tuple(tensor.shape) != rule.size_for(first)) or tensor.dtype != rule.dtype:
                found = f"a tensor of {tuple(tensor.shape)}, {tensor.dtype}"
                raise _unexpected(name, found, f"{rule.size_for(first)}, {rule.dtype}")
        return tensors

    def keep_shape(self, index: int, signature: Hashable, shape: tuple[list[int], list[int]]) -> None:
        """Keep the shape that tensor ``index`` has in forwards of ``signature``; the sender and the receivers call it.

        Both forget all shapes of the tensor at the same call.
        """
        known = self.shapes.setdefault(index, {})
        if len(known) >= _MOST_SHAPES:
            known.clear()
        known[signature] = shape

    def want(self, index: int, ranks: frozenset[int]) -> None:
        """Send tensor ``index`` to ``ranks`` from now on."""
        if others := ranks - self.executors - self.wanted.get(index, set()):
            self.wanted.setdefault(index, set()).update(others)
            self.shapes.clear()


Plan = dict[tuple[str, int], KnownCall]
"""The calls of a forward by the name of the module and the number of its call."""

Plans = dict[Hashable, Plan]
"""The calls of forwards by their kind."""


def _unexpected(name: str, found: str, expected: str) -> RuntimeError:
    return RuntimeError(
        f"generate over a pipeline: {name} returns {found}, and other ranks expect {expected}, as in its first call. "
        f"{REMEDY}"
    )


def rule_of(value: Any, first: torch.Tensor | None) -> Any:
    """Return the mark in a template for ``value`` of an output."""
    if not isinstance(value, torch.Tensor):
        return CACHE if isinstance(value, Cache) else value
    given = () if first is None else tuple(first.shape)
    follows = tuple(i < len(given) and given[i] == size for i, size in enumerate(value.shape))
    return OutputRule(tuple(value.shape), value.dtype, follows, all(follows[:-1]))

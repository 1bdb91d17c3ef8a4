"""What a rank knows of the modules that a forward calls: who runs them, and who needs their results."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import Cache

from nxdpp.generation.absent import AbsentTensor, Root, ShapelessTensor, leaves_in, tracked_as
from nxdpp.generation.caches import CacheUpdate

CACHE = "nxdpp: the cache"
"""It stands for the cache among the values that a module returns."""


@dataclass(frozen=True)
class OutputRule:
    """What ranks without the values know of a tensor that a module returns.

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

    ``shapes`` are sizes and strides by the number of a tensor and the signature of the forward.
    """

    home: int
    executors: frozenset[int]
    template: Any
    updates: Sequence[CacheUpdate] = ()
    wanted: dict[int, set[int]] = field(default_factory=dict)
    shapes: dict[tuple[int, Any], tuple[list[int], list[int]]] = field(default_factory=dict)

    @property
    def rules(self) -> list[OutputRule]:
        """What is known of each tensor of the output."""
        return [each for each in leaves_in(self.template) if isinstance(each, OutputRule)]

    def check(self, name: str, tensors: Sequence[torch.Tensor], first: torch.Tensor | None) -> None:
        """Raise ``RuntimeError`` if other ranks expect different sizes or dtypes of the returned ``tensors``."""
        for tensor, rule in zip(tensors, self.rules, strict=True):
            if (rule.has_shape and tuple(tensor.shape) != rule.size_for(first)) or tensor.dtype != rule.dtype:
                raise RuntimeError(
                    f"generate over a pipeline: {name} returns a tensor of {tuple(tensor.shape)}, {tensor.dtype}, and "
                    f"other ranks expect {rule.size_for(first)}, {rule.dtype}, as in its first call. Generate in one "
                    f"process: model.save_pretrained(directory) on every rank, then from_pretrained(directory)."
                )

    def want(self, index: int, ranks: frozenset[int]) -> None:
        """Send tensor ``index`` to ``ranks`` from now on."""
        if others := ranks - self.executors - self.wanted.get(index, set()):
            self.wanted.setdefault(index, set()).update(others)
            self.shapes.clear()


Plan = dict[tuple[str, int], KnownCall]
"""The calls of a forward by the name of the module and the number of its call."""

Plans = dict[Hashable, Plan]
"""The calls of forwards by their kind."""


def rule_of(value: Any, first: torch.Tensor | None) -> Any:
    """What stands in a template for ``value`` of an output."""
    if not isinstance(value, torch.Tensor):
        return CACHE if isinstance(value, Cache) else value
    given = () if first is None else tuple(first.shape)
    follows = tuple(i < len(given) and given[i] == size for i, size in enumerate(value.shape))
    return OutputRule(tuple(value.shape), value.dtype, follows, all(follows[:-1]))

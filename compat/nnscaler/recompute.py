"""Modules of a parallel module that recompute their forward in the backward."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from nxdpp import apply_checkpoint


@dataclass
class _Part:
    """The attributes that ``apply_checkpoint`` reads of a wrapped model."""

    original_module: nn.Module
    local: nn.Module
    rank: int = 0
    layers: list[str] = field(default_factory=list)
    stage_layers: list[str] = field(default_factory=list)

    def local_named_modules(self, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Give this rank's modules under their original names."""
        yield from self.local.named_modules(**kwargs)


def recompute(whole: nn.Module, part: nn.Module, names: Sequence[str]) -> None:
    """Let the modules ``names`` of ``whole`` that are in ``part`` recompute their forward in the backward.

    Names of parameters do not change, and dropout repeats.
    """
    if names:
        apply_checkpoint(_Part(whole, part), list(names))


def modules_named(module: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    """Return the qualified names of modules whose name, class, or last parts of the name are in ``names``.

    Raises ``ValueError`` for a name without a module.
    """
    found: dict[str, None] = {}
    for name in names:
        matches = [
            path
            for path, part in module.named_modules()
            if path and (f".{path}".endswith(f".{name}") or type(part).__name__ == name)
        ]
        if not matches:
            raise ValueError(f"{type(module).__name__} has no module {name!r}, by its name or its class")
        found |= dict.fromkeys(matches)
    return tuple(found)

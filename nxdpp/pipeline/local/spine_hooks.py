"""Hooks of modules that no stage runs: modules above the layers, and containers.

A graph has the hooks that modules above the layers had at its trace. A hook that is registered later would never run,
and a hook that is removed would still run.
"""

import logging
from collections.abc import Collection, Sequence

from torch import nn

from nxdpp.ground.torch_names import FORWARD_HOOKS, FORWARD_PRE_HOOKS, HOOKS
from nxdpp.pipeline.local.elsewhere_tensors import is_refusal
from nxdpp.tracing.modules import listings

_logger = logging.getLogger(__name__)


class SpineHooks:
    """Finds hooks of the modules above ``layers`` in ``root``, and of the containers in ``tree``, that change.

    Attributes:
        modules: those modules and containers, and the modules that the containers mirror.
    """

    def __init__(self, root: nn.Module, tree: nn.Module, layers: Collection[str]) -> None:
        self._above = _above_layers(root, layers)
        pairs = [(name, module, root.get_submodule(name)) for name, module in listings.named_modules(tree)]
        self._containers = [(name, module) for name, module, mirrored in pairs if module is not mirrored]
        both = [part for _, module, mirrored in pairs if module is not mirrored for part in (module, mirrored)]
        self.modules = list(dict.fromkeys([*(module for _, module in self._above), *both]))

    def check(self, changed: Collection[nn.Module]) -> None:
        """Raise ``RuntimeError`` for ``changed`` modules above the layers, and for hooks of containers."""
        names = [name or "the whole model" for name, module in self._above if module in changed]
        if names:
            raise RuntimeError(
                f"hooks of {', '.join(names)} changed after wrapping, and no "
                f"stage runs such a module as a whole: the change would be ignored. Call refresh() on every rank: "
                f"forward hooks are then traced into each step. Or register them on layers and modules in them."
            )
        for name, container in self._containers:
            if any(hooks.of(container) for hooks in HOOKS):
                raise RuntimeError(
                    f"local_module{name and f'.{name}'} has a hook that would never run: it is a container, which "
                    f"holds modules and is not run. Remove the hook, and register it on layers and modules in them."
                )


def warn_of_traced_hooks(module: nn.Module, layers: Sequence[str]) -> None:
    """Log a warning for forward hooks of modules that hold transformer layers: they run while these are traced."""
    traced = []
    for name, child in _above_layers(module, layers):
        if FORWARD_HOOKS.of(child) or not all(map(is_refusal, FORWARD_PRE_HOOKS.of(child).values())):
            traced.append(name or type(module).__name__)
    if traced:
        _logger.warning(
            "hooks of %s run when a graph is traced, not in each step: what they compute of inputs and outputs is part "
            "of every step, and other effects (prints, lists, counters) happen at the trace alone; these modules hold "
            "transformer layers, and no stage runs them as a whole; hooks of layers and of the modules in them run in "
            "each step",
            ", ".join(traced),
        )


def _above_layers(root: nn.Module, layers: Collection[str]) -> list[tuple[str, nn.Module]]:
    """Return the modules of ``root`` that hold ``layers``, by name; the root is ``""``."""
    parts = [layer.split(".") for layer in layers]
    names = {""} | {".".join(part[:depth]) for part in parts for depth in range(1, len(part))}
    return [(name, root.get_submodule(name)) for name in sorted(names)]

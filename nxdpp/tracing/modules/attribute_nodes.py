"""Nodes of a graph that read or store an attribute of a module.

A node that follows the run of the module takes its output. A node that precedes it returns an argument of the run.
"""

from operator import attrgetter
from typing import Any

from torch import fx, nn


def left_behind(output: Any, leaf: nn.Module, path: str, name: str) -> Any:
    """Attribute ``name`` of module ``path`` of ``leaf``, which has just returned ``output``.

    Raises ``RuntimeError`` for a missing attribute.
    """
    try:
        return getattr(_submodule(leaf, path), name)
    except AttributeError:
        raise RuntimeError(
            f"a run of {type(leaf).__name__} has not set {dotted(path, name)}, which the trace took it to do. Set it "
            f"in __init__ too, and in every run of forward."
        ) from None


def expect_not_left_behind(output: Any, leaf: nn.Module, path: str, name: str) -> None:
    """Raise ``RuntimeError`` for an attribute that ``leaf`` has after the run that returned ``output``."""
    if hasattr(_submodule(leaf, path), name):
        raise RuntimeError(
            f"a run of {type(leaf).__name__} has set {dotted(path, name)}, which the trace took to be missing. Set it "
            f"in __init__ too."
        )


def has_left_behind(output: Any, leaf: nn.Module, path: str, name: str) -> bool:
    """Return whether module ``path`` of ``leaf`` has the attribute after the run that returned ``output``."""
    return hasattr(_submodule(leaf, path), name)


def store_before(argument: Any, leaf: nn.Module, *stores: Any) -> Any:
    """Store attributes on modules of ``leaf`` before it runs; return ``argument``, which ``leaf`` takes.

    ``stores`` are path, name and value of each attribute, one after the other.
    """
    for path, name, value in zip(stores[::3], stores[1::3], stores[2::3], strict=True):
        setattr(_submodule(leaf, path), name, value)
    return argument


def store_after(output: Any, leaf: nn.Module, path: str, name: str, value: Any) -> None:
    """Store an attribute on a module of ``leaf``, which has returned ``output``."""
    setattr(_submodule(leaf, path), name, value)


def reads_left_behind(node: fx.Node) -> bool:
    """Return whether ``node`` reads or stores an attribute of a module that has run, and so stays on its stage."""
    return node.target in (left_behind, expect_not_left_behind, store_after)


def dotted(path: str, name: str) -> str:
    """``path.name``, or the one of them that is not empty."""
    return f"{path}.{name}" if path and name else path or name


def _submodule(leaf: nn.Module, path: str) -> nn.Module:
    # A wrapper (torch.compile) has the attributes of its module, and not its submodules.
    module: nn.Module = attrgetter(path)(leaf) if path else leaf
    return module

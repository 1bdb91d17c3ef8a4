"""Root of a rank's tree of modules, with the flat list of modules that recipes for NeuronX Distributed walk.

::

    named_children()                 children()
    model.embed_tokens               model  (container)
    model.layers.0                     layers  (container)
    model.layers.1                       0, 1
"""

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, NoReturn, Self
from weakref import WeakKeyDictionary, WeakMethod

from torch import nn

from nxdpp.ground.torch_names import BUFFERS, MODULES, MOVE, NON_PERSISTENT, PARAMETERS
from nxdpp.tensor.move_model_to_device import convert_parameters

# Not an attribute: a copy of a tree follows nothing. The methods are of objects that hold the tree.
_before_listings: "WeakKeyDictionary[LocalModule, WeakMethod[Callable[[], None]]]" = WeakKeyDictionary()


class LocalModule(nn.Module):
    """A container whose ``named_children`` are this rank's modules under their full names.

    ``add_module`` takes a full name, too, and replaces a module below. ``children`` are the children in the tree,
    which torch needs for moves and modes. What it lists has followed all replacements in the wrapped model.
    """

    def run_before_listings(self, follow: Callable[[], None]) -> None:
        """Call ``follow``, a method, before modules, tensors or the state dict are listed."""
        _before_listings[self] = WeakMethod(follow)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """All modules, as torch's; parameters and buffers are listed by it."""
        self._follow()
        yield from super().named_modules(*args, **kwargs)

    def get_submodule(self, target: str) -> nn.Module:
        """The module of this name."""
        self._follow()
        return super().get_submodule(target)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state dict, as torch's."""
        self._follow()
        return super().state_dict(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise ``RuntimeError``: stages run the modules below."""
        raise RuntimeError(
            "local_module holds this rank's modules, and is not run as a whole: call run_train or run_eval of the "
            "pipelined model."
        )

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The outermost modules that stages run, each once, under their full names."""
        seen: set[nn.Module] = set()
        for name, module in _held(self, ""):
            if module not in seen:
                seen.add(module)
                yield name, module

    def children(self) -> Iterator[nn.Module]:
        """The modules directly below, which may be containers."""
        yield from (module for _, module in super().named_children())

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a module, or replace the one of this full name."""
        if "." not in name:
            super().add_module(name, module)
            return
        owner, _, key = name.rpartition(".")
        above = self.get_submodule(owner)
        if key not in MODULES.of(above):
            held = list(dict(self.named_children()))
            raise KeyError(f"there is no module {name!r} on this rank to replace; there are {held}.")
        above.add_module(key, module)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Move or convert; parameters that torch must replace keep their classes, attributes and ties."""
        convert_parameters(self, fn, partial(MOVE.of(super()), fn, recurse))
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if "." in name and isinstance(value, nn.Module):
            self.add_module(name, value)
        else:
            super().__setattr__(name, value)

    def _follow(self) -> None:
        method = _before_listings.get(self)
        if method is not None and (follow := method()) is not None:
            follow()


def is_container(module: nn.Module) -> bool:
    """Return whether ``module`` is an empty module above the modules that stages run."""
    return type(module) in (nn.Module, LocalModule)


def stage_module(tree: nn.Module, names: Collection[str], owned: Collection[str]) -> LocalModule:
    """Return the part of a rank's ``tree`` that one stage runs, with the same modules and tensors.

    Args:
        tree: containers and modules of the rank.
        names: the parameters, and changing buffers, of the stage.
        owned: the names of all stages. Modules that have none of them belong to every stage.
    """
    part = LocalModule()
    _copy(tree, part, "", names, owned)
    return part


def _copy(tree: nn.Module, part: nn.Module, prefix: str, names: Collection[str], owned: Collection[str]) -> None:
    part.train(tree.training)
    for key, parameter in PARAMETERS.of(tree).items():
        if parameter is not None and f"{prefix}{key}" in names:
            part.register_parameter(key, parameter)
    for key, buffer in BUFFERS.of(tree).items():
        if buffer is not None and (f"{prefix}{key}" in names or f"{prefix}{key}" not in owned):
            part.register_buffer(key, buffer, persistent=key not in NON_PERSISTENT.of(tree))
    for key, child in MODULES.of(tree).items():
        below = f"{prefix}{key}."
        if child is None:
            continue
        if is_container(child):
            copied = nn.Module()
            _copy(child, copied, below, names, owned)
            part.add_module(key, copied)
        elif _any_below(below, names) or not _any_below(below, owned):
            part.add_module(key, child)


def _any_below(prefix: str, names: Collection[str]) -> bool:
    return any(name.startswith(prefix) for name in names)


def _held(container: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for key, child in MODULES.of(container).items():
        if child is not None:
            name = f"{prefix}{key}"
            if is_container(child):
                yield from _held(child, f"{name}.")
            else:
                yield name, child

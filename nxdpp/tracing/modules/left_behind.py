"""Attributes that modules leave behind next to their output: ``self.aux_loss = ...`` in the forward of a layer.

The spine reads such an attribute after the layer has run (``sum(layer.aux_loss for layer in self.layers)``). The
trace does not run layers, so the attribute is a value of the graph, read on the stage of the layer::

    x ── layers.0 ── hidden ── layers.1 ── ...
             └─ left_behind(hidden, layers.0, "", "aux_loss") ──────── sum ── loss

A value that the spine stores on a layer is refused: no step would store it.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from operator import attrgetter
from typing import Any, NoReturn
from unittest.mock import patch

from torch import fx, nn

from nxdpp.ground.torch_names import BUFFERS, MODULES, PARAMETERS
from nxdpp.tracing.code.frames import Frame, caller, function_name, module_of, outwards, runs
from nxdpp.tracing.code.stored_names import stored_names
from nxdpp.tracing.graph.checks import checked_for_none, run_in_every_step
from nxdpp.tracing.modules import listings
from nxdpp.tracing.sizes.sizes import UnknownSizeError
from nxdpp.tracing.values.lost_changes import ROOT

_MISSING = object()
# Machinery of the trace reads and stores attributes of all modules.
_MACHINERY = ("torch.", "nxdpp.")


class LeftBehind:
    """Attributes of ``leaves``, the modules of ``model`` that are not traced through, in one trace."""

    def __init__(self, tracer: Any, model: nn.Module, spine: Collection[str], leaves: Sequence[nn.Module]) -> None:
        self._tracer = tracer
        self._thread = threading.get_ident()
        self._model = model
        self._spine = spine
        self._leaves = set(leaves)
        self._stored = stored_names(leaves)
        self._watched: set[type] = set()
        self._stack = ExitStack()
        self._modules: dict[str, fx.Proxy] = {}
        # Outputs of the leaves that have run, and attributes that were read since.
        self._outputs: dict[str, fx.Proxy] = {}
        self._read: dict[tuple[nn.Module, str], Any] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Answer reads of attributes that leaves store.

        Raises ``RuntimeError`` for a read before the run, and for an attribute that the spine stores on a leaf.
        """
        with self._stack:
            for cls, module in {type(module): module for module in self._leaves}.items():
                if self._stored.of(module):
                    self._watch_reads(cls)
            self._watch_stores()
            yield

    def hasattr(self, owner: Any, name: str) -> bool:
        """``hasattr`` for traced code."""
        if name == "keys" and isinstance(owner, fx.Proxy) and self._tracer.is_tensor(owner.node):
            return False  # a proxy has it
        return hasattr(owner, name)

    def after_run(self, leaf: str, output: fx.Proxy) -> None:
        """Note that ``leaf`` has returned ``output``."""
        if not self._watched:
            return
        self._outputs.pop(leaf, None)
        self._outputs[leaf] = output
        for module, name in list(self._read):
            if self._stored.stores(module, name) and _holds(leaf, self._place(module, name)):
                del self._read[module, name]

    def _watch_reads(self, cls: type) -> None:
        if cls in self._watched:
            return
        self._watched.add(cls)
        original: Any = cls.__getattribute__

        def get(module: Any, name: str) -> Any:
            if not self._is_spine_code(module, caller()):
                return original(module, name)
            if name == "__dict__":
                raise RuntimeError(
                    f"forward reads the __dict__ of {type(module).__name__}, a module that sets attributes when it "
                    f"runs. Read the attribute itself (module.name, getattr(module, name))."
                )
            known = getattr(type(module), name, None)
            if isinstance(known, property) or callable(known) or name in MODULES.of(module):
                return original(module, name)
            if not self._stored.stores(module, name):
                return original(module, name)
            if name in original(module, PARAMETERS.name):
                # A forward cannot set it to a value that it computes.
                return original(module, name)
            return self._value(module, name, asks_only=runs(caller(), LeftBehind.hasattr))

        self._stack.enter_context(patch.object(cls, "__getattribute__", get))

    def _watch_stores(self) -> None:
        set_attribute, delete_attribute = nn.Module.__setattr__, nn.Module.__delattr__

        def store(module: nn.Module, name: str, value: Any) -> None:
            if self._is_spine_code(module, caller()):
                self._refuse_store(module, name, value)
            set_attribute(module, name, value)

        def delete(module: nn.Module, name: str) -> None:
            if self._is_spine_code(module, caller()):
                raise RuntimeError(
                    f"forward deletes an attribute, {type(module).__name__}.{name}. Let the module set it to None."
                )
            delete_attribute(module, name)

        self._stack.enter_context(patch.object(nn.Module, "__setattr__", store))
        self._stack.enter_context(patch.object(nn.Module, "__delattr__", delete))

    def _is_spine_code(self, module: nn.Module, frame: Frame) -> bool:
        if threading.get_ident() != self._thread or module not in self._leaves:
            return False
        # A wrapper (CheckpointWrapper) reads the attribute of its module in __getattr__.
        asker = next(outer for outer in outwards(frame) if function_name(outer) != "__getattr__")
        return runs(asker, LeftBehind.hasattr) or not f"{module_of(asker)}.".startswith(_MACHINERY)

    def _value(self, module: nn.Module, name: str, asks_only: bool) -> Any:
        """Return the attribute as a traced value, or ``None`` where it is ``None``."""
        place = self._place(module, name)
        leaf = self._last_run(place)
        if leaf is None:
            if asks_only and self._stored.has_from_construction(module, name):
                return None
            raise RuntimeError(
                f"forward reads {dotted(place, name)} before {place} runs, which sets it; the value would be that of "
                f"another microbatch. Read it after the run."
            )
        if (module, name) not in self._read:
            guess = not asks_only or self._stored.has_from_construction(module, name)
            guess = guess or name in self._stored.on_self.get(type(module), ())
            self._read[module, name] = self._read_after_run(leaf, _below(leaf, place), name, guess)
        if self._read[module, name] is _MISSING:
            raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}")
        return self._read[module, name]

    def _read_after_run(self, leaf: str, path: str, name: str, guess: bool) -> Any:
        output = self._outputs[leaf]
        question = self._record(has_left_behind, output, leaf, path, name)
        try:
            exists = self._tracer.read(question.node, bool)
        except UnknownSizeError:
            exists = guess
        self._tracer.graph.erase_node(question.node)
        if not exists:
            run_in_every_step(self._record(expect_not_left_behind, output, leaf, path, name))
            return _MISSING
        value = self._record(left_behind, output, leaf, path, name)
        return checked_for_none(value, *self._tracer.is_none(value.node))

    def _refuse_store(self, module: nn.Module, name: str, value: Any) -> NoReturn:
        called = dotted(self._place(module, name), name)
        if isinstance(value, nn.Module):
            raise RuntimeError(
                f"forward replaces {called}, a module, by another one. Give the model the configuration in which it "
                f"does not (BigBird: attention_type='original_full'), or replace the module before wrapping."
            )
        if name in PARAMETERS.of(module) or name in BUFFERS.of(module) or name in MODULES.of(module):
            raise RuntimeError(
                f"forward replaces {called}, a parameter, buffer or module, by {value!r}. Replace it before wrapping."
            )
        raise RuntimeError(
            f"forward stores a {type(value).__name__} in {called}, an attribute of a module that runs as one node. "
            f"Pass it as an argument of that module, or let the module begin with the value in each run."
        )

    def _last_run(self, place: str) -> str | None:
        """The leaf that holds the module ``place`` and ran last."""
        return next((leaf for leaf in reversed(self._outputs) if _holds(leaf, place)), None)

    def _record(self, function: Callable[..., Any], value: fx.Proxy, leaf: str, *constants: Any) -> fx.Proxy:
        if leaf not in self._modules:
            self._modules[leaf] = self._tracer.create_proxy("get_attr", dotted(ROOT, leaf), (), {})
        arguments = (value, self._modules[leaf], *constants)
        proxy: fx.Proxy = self._tracer.create_proxy("call_function", function, arguments, {})
        return proxy

    @cached_property
    def _places(self) -> dict[nn.Module, list[str]]:
        """The names of each module outside the spine."""
        places: dict[nn.Module, list[str]] = {}
        for name, module in listings.named_modules(self._model, remove_duplicate=False):
            if name not in self._spine:
                places.setdefault(module, []).append(name)
        return places

    def _place(self, module: nn.Module, name: str) -> str:
        places = self._places[module]
        if len(places) > 1:
            raise RuntimeError(
                f"forward uses {type(module).__name__}.{name} of a module with several names, {', '.join(places)}; on "
                f"each stage it would be that of another run. Return the value from forward."
            )
        return places[0]


def _holds(leaf: str, place: str) -> bool:
    return f"{place}.".startswith(f"{leaf}.")


def _below(leaf: str, place: str) -> str:
    return place[len(leaf) + 1 :]


# Nodes that follow the run of the module take its output.


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


def reads_left_behind(node: fx.Node) -> bool:
    """Return whether ``node`` reads an attribute of a module that has run, and so stays on its stage."""
    return node.target in (left_behind, expect_not_left_behind)


def dotted(path: str, name: str) -> str:
    """``path.name``, or the one of them that is not empty."""
    return f"{path}.{name}" if path and name else path or name


def _submodule(leaf: nn.Module, path: str) -> nn.Module:
    # A wrapper (torch.compile) has the attributes of its module, and not its submodules.
    module: nn.Module = attrgetter(path)(leaf) if path else leaf
    return module

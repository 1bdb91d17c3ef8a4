"""One record of what has changed in a wrapped model. A step asks it once, and looks again only at what has moved.

::

    modules, parameters, buffers registered     hooks of torch, for followed modules ┐
    load, initialisation, move, refresh         note()                               ├─▶ a number for each kind ─▶ Watch
    requires_grad, modes, hooks, other writes   one flat pass of each step: look()   ┘

Whatever was found out about the model is found out again when one of its kinds has a later number (``Watch``).

The flat pass makes no Python call for a module or a parameter. Torch writes into ``_parameters`` and ``_modules``
without a hook too (``_apply``, ``del``). For such writes the pass compares the entries of the modules above the layers,
and one parameter of each layer. In looks 1, 2, 4, 8 and so on it compares all entries.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from itertools import chain, compress
from operator import attrgetter, is_, itemgetter, methodcaller, not_
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as registration

from nxdpp.gradients.shards.local_tensors import is_of_shards, is_sharded
from nxdpp.ground.torch_names import BUFFERS, HOOKS, MODULES, PARAMETERS
from nxdpp.ranks import parallel_state
from nxdpp.tracing.modules import listings


class Change(Enum):
    """Kinds of changes."""

    MODULE = auto()
    PARAMETER = auto()
    BUFFER = auto()
    GRADIENT = auto()
    """``requires_grad`` of a parameter."""
    MODE = auto()
    """``train()`` or ``eval()`` of a module."""
    HOOK = auto()
    """A hook of a module above the layers, or of a container."""
    FORWARD = auto()
    """A ``forward`` that a module above the layers has of its own."""
    VALUES = auto()
    """Values that a load or an initialisation has set."""
    MOVE = auto()
    """Another device or dtype."""


ENTRIES = (Change.MODULE, Change.PARAMETER, Change.BUFFER)
TENSORS = (*ENTRIES, Change.VALUES, Change.MOVE)

_STORES = {Change.MODULE: MODULES.name, Change.PARAMETER: PARAMETERS.name, Change.BUFFER: BUFFERS.name}

_requires_grad = attrgetter("requires_grad")
_dtype = attrgetter("dtype")
_training = itemgetter("training")
_forward = methodcaller("get", "forward")
# torch's parametrize gives a module a child of this name.
_PARAMETRIZATIONS = "parametrizations"
_is_parametrized = methodcaller("__contains__", _PARAMETRIZATIONS)

_records: "weakref.WeakSet[ChangeRecord]" = weakref.WeakSet()
_handles: list[Any] = []


class ChangeRecord:
    """The numbers of the changes of one wrapped model.

    Attributes:
        number: of the last change.
    """

    def __init__(self) -> None:
        self.number = 1
        self._numbers = dict.fromkeys(Change, 1)
        self._looks = 0
        self._is_stale = False
        # Children of the modules that were parametrized since the last look, by id of the module.
        self._parametrized: dict[int, dict[str, Any]] = {}
        self._tree: nn.Module = nn.Module()
        self._above: Sequence[nn.Module] = ()
        self._whole = self._tree
        self._sight = _Sight(self._tree, (), self._whole)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """This rank's parameters, each once, as of the last look."""
        return self._sight.parameters

    @property
    def device(self) -> torch.device:
        """The device of this rank's parameters; without parameters, the rank's own."""
        return self._sight.device or parallel_state.local_device()

    @property
    def modules(self) -> list[nn.Module]:
        """This rank's modules and the modules above the layers, as of the last look."""
        return self._sight.modules

    def follow(self, tree: nn.Module, above: Sequence[nn.Module], whole: nn.Module | None = None) -> None:
        """Follow the modules of ``tree``, which are this rank's, and those ``above`` the layers of all ranks.

        It follows only the buffers of ``above``: a module that a stage runs may have new buffers after each forward.
        Of the other modules in ``whole`` it follows the registrations: forward's code may read their modes.
        """
        self._tree, self._above, self._whole = tree, above, tree if whole is None else whole
        self._sight = _Sight(tree, above, self._whole)
        _records.add(self)
        if not _handles:
            _handles.extend(_follow_registrations())

    def follows_above(self, modules: Iterable[nn.Module]) -> bool:
        """Return whether a look sees hooks, modes, entries and ``forward`` of all ``modules``."""
        return self._sight.above.issuperset(map(id, modules))

    def note(self, *changes: Change) -> None:
        """Note ``changes`` that torch does not tell of."""
        self.number += 1
        self._numbers.update(dict.fromkeys(changes, self.number))
        self._is_stale = True

    def watch(self, *changes: Change) -> "Watch":
        """Return a watch for ``changes``. At first it has moved."""
        return Watch(self, changes)

    def last(self, changes: Iterable[Change]) -> int:
        """Return the number of the last of ``changes``."""
        return max(map(self._numbers.__getitem__, changes))

    def look(self) -> int:
        """Note what has changed since the last look; return the number of the last change."""
        self._looks += 1
        is_stale = self._is_stale or any(map(_is_parametrized, self._parametrized.values()))
        if is_stale or not self._looks & (self._looks - 1) or not self._sight.is_same():
            self._look_at_all()
        self._parametrized.clear()
        return self.number

    def take_hooks(self) -> bool:
        """Take the present hooks as known, after a trace, which adds some; return whether they have changed."""
        has_changed = bool(self.with_changed_hooks())
        self._sight.take_hooks()
        return has_changed

    def with_changed_hooks(self) -> list[nn.Module]:
        """The modules whose hooks have changed since ``take_hooks``."""
        return self._sight.with_changed_hooks(self._above)

    def registered(self, change: Change, module: nn.Module, name: str, value: Any) -> None:
        """Note that ``value`` is about to be registered in ``module``, if the record follows it."""
        followed = self._sight.above if change is Change.BUFFER else self._sight.registering
        if id(module) not in followed or vars(module)[_STORES[change]].get(name) is value:
            return
        children = MODULES.of(module)
        if name == _PARAMETRIZATIONS:
            # PEFT's LoraConfig(target_parameters=...) does so in each forward, and puts the parameter back: look then.
            self._parametrized[id(module)] = children
        elif _PARAMETRIZATIONS not in children or not (id(value) in self._sight.known or is_of_shards(value)):
            self.note(change)

    def _look_at_all(self) -> None:
        before, self._sight = self._sight, _Sight(self._tree, self._above, self._whole)
        changes = self._sight.changes_since(before)
        if changes:
            self.note(*changes)
        self._is_stale = False


def parameters_of_all_models() -> list[nn.Parameter]:
    """This rank's parameters of all wrapped models that are alive."""
    return [parameter for record in list(_records) for parameter in record.parameters]


def note_in_all_models(*changes: Change) -> None:
    """Note ``changes`` in all wrapped models that are alive."""
    for record in list(_records):
        record.note(*changes)


class Watch:
    """Tells whether the record has noted a change of one of the kinds ``changes`` since ``settle``."""

    def __init__(self, record: ChangeRecord, changes: Sequence[Change]) -> None:
        self._record = record
        self._changes = changes
        self._number = 0

    @property
    def has_moved(self) -> bool:
        """``True`` after a change, until ``settle``."""
        return self._number != self._record.number and self._record.last(self._changes) > self._number

    def settle(self) -> None:
        """Take the changes until now as known."""
        self._number = self._record.number


class _Sight:
    """The facts of a model that are compared, as flat lists.

    Attributes:
        modules, parameters: that are followed, each once.
        ids, known: of the modules, and of the parameters.
        registering: ids of the modules, and of the modules of other ranks.
        above: ids of the modules above the layers, and of the containers.
    """

    def __init__(self, tree: nn.Module, above: Sequence[nn.Module], whole: nn.Module) -> None:
        self.modules = list(dict.fromkeys([*listings.modules(tree), *above]))
        self.parameters = list(listings.parameters(tree))
        self.ids = frozenset(map(id, self.modules))
        self.known = frozenset(map(id, self.parameters))
        self.registering = self.ids.union(map(id, listings.modules(whole)))
        self.above = frozenset(map(id, above))
        # The module that torch.compile makes has the mode of the one inside.
        self._attributes = [vars(module) for module in self.modules if "training" in vars(module)]
        self._modes = list(map(_training, self._attributes))
        # Rows of shards may be kept on the host.
        has_own = bool(self.parameters) and not is_sharded(self.parameters[0])
        self.device = self.parameters[0].device if has_own else None
        self._gradients = list(map(_requires_grad, self.parameters))
        # A pass over equal values needs no list.
        self._trained = list(compress(self.parameters, self._gradients))
        self._frozen = list(compress(self.parameters, map(not_, self._gradients)))
        self._in_training = list(compress(self._attributes, self._modes))
        self._in_evaluation = list(compress(self._attributes, map(not_, self._modes)))
        self._attributes_above = [vars(module) for module in above]
        self._forwards = list(map(_forward, self._attributes_above))
        self._hook_dicts = [hooks.of(module) for module in above for hooks in HOOKS]
        self.take_hooks()
        self._entries = {
            change: [vars(module)[store] for module in (above if change is Change.BUFFER else self.modules)]
            for change, store in _STORES.items()
        }
        self._values = {change: _values(dicts) for change, dicts in self._entries.items()}
        self._dicts_above = [vars(module)[store] for module in above for store in _STORES.values()]
        self._values_above = _values(self._dicts_above)
        # One parameter of each module that a stage runs: ``_apply`` replaces or converts all of them.
        children = (child for module in above for child in MODULES.of(module).values() if child is not None)
        firsts = (_first_parameter(child) for child in children if id(child) in self.ids - self.above)
        samples = [first for first in firsts if first is not None]
        self._sampled_dicts = [parameters for parameters, _ in samples]
        self._sampled_names = [name for _, name in samples]
        self._samples = [parameters[name] for parameters, name in samples]
        self._dtypes = list(map(_dtype, self._samples))
        self._device = self._samples[0].device if self._samples else None

    def is_same(self) -> bool:
        """Return whether the model is still as it was, as far as the flat pass sees it."""
        return (
            all(map(_requires_grad, self._trained))
            and not any(map(_requires_grad, self._frozen))
            and all(map(_training, self._in_training))
            and not any(map(_training, self._in_evaluation))
            and self._hook_dicts == self._hooks
            and all(map(is_, map(_forward, self._attributes_above), self._forwards))
            and _are_same(_values(self._dicts_above), self._values_above)
            and all(map(is_, map(dict.get, self._sampled_dicts, self._sampled_names), self._samples))
            and not self._has_moved()
        )

    def take_hooks(self) -> None:
        """Take the present hooks as known."""
        self._hooks = [dict(hooks) for hooks in self._hook_dicts]

    def with_changed_hooks(self, above: Sequence[nn.Module]) -> list[nn.Module]:
        """The modules ``above`` the layers whose hooks differ from the known ones."""
        pairs = zip(self._hook_dicts, self._hooks, strict=True)
        changed = [now != known for now, known in pairs]
        return [module for number, module in enumerate(above) if any(changed[number * len(HOOKS) :][: len(HOOKS)])]

    def changes_since(self, before: "_Sight") -> list[Change]:
        """Return the kinds of what is not as it was in ``before``, whose entries may have been changed in place."""
        changes = [change for change in _STORES if not _are_same(self._values[change], before._values[change])]
        if [p.requires_grad for p in before.parameters] != before._gradients:
            changes.append(Change.GRADIENT)
        if [v["training"] for v in before._attributes] != before._modes:
            changes.append(Change.MODE)
        if not all(map(is_, map(_forward, before._attributes_above), before._forwards)):
            changes.append(Change.FORWARD)
        if before._hook_dicts != before._hooks:
            # Hooks that no trace has added stay changes until ``take_hooks``.
            self._hooks = before._hooks
            changes.append(Change.HOOK)
        if before._has_moved():
            changes.append(Change.MOVE)
        return changes

    def _has_moved(self) -> bool:
        # The parameters of a rank are on one device.
        return list(map(_dtype, self._samples)) != self._dtypes or (
            bool(self._samples) and self._samples[0].device != self._device
        )


def _values(dicts: Iterable[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, dicts)))


def _are_same(now: Sequence[Any], before: Sequence[Any]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))


def _first_parameter(module: nn.Module) -> tuple[dict[str, Any], str] | None:
    for child in listings.modules(module):
        for name, parameter in PARAMETERS.of(child).items():
            if parameter is not None:
                return PARAMETERS.of(child), name
    return None


def _follow_registrations() -> list[Any]:
    registrations: dict[Change, Callable[..., Any]] = {
        Change.MODULE: registration.register_module_module_registration_hook,
        Change.PARAMETER: registration.register_module_parameter_registration_hook,
        Change.BUFFER: registration.register_module_buffer_registration_hook,
    }

    def told(change: Change) -> Callable[[nn.Module, str, Any], None]:
        def tell(module: nn.Module, name: str, value: Any) -> None:
            for record in list(_records):
                record.registered(change, module, name, value)

        return tell

    return [register(told(change)) for change, register in registrations.items()]

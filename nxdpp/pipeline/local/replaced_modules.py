"""Replacements of modules, parameters and buffers after the model was cut, in the rank's tree or in the whole model.

Parameters are listed from the tree, graphs run the modules of the whole model. Below a layer both have the same
objects. Above layers the tree has containers, and a replacement in one has to be made in the other::

    tree      lm_head ─▶ LoRA(Linear)    replaced by a hook
    model     lm_head ─▶ Linear          follows

A rank that has a tied weight under the name of a module of another rank makes the replacement too, to have its names.
"""

import inspect
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import torch
from torch import nn

from nxdpp.ground.torch_names import BUFFERS, MODULES, PARAMETERS
from nxdpp.pipeline.local.tree import free_others, names_of_module
from nxdpp.tracing.modules import listings

_STORES = (MODULES, PARAMETERS, BUFFERS)


# The attributes of each module that are its own; all others are the user's.
_OF_MODULES = frozenset(vars(nn.Module()))


def copy_modes(source: nn.Module, target: nn.Module) -> None:
    """Give ``target`` the ``training`` and ``requires_grad`` of what has the same names in ``source``.

    A tensor may be the value of a property there: adapters show the weight of the layer that they adapt.
    """
    modules = dict(listings.named_modules(source))
    for name, module in listings.named_modules(target):
        module.training = modules.get(name, source).training
    for name, parameter in listings.named_parameters(target):
        found = _attribute(source, name)
        if isinstance(found, torch.Tensor):
            parameter.requires_grad_(found.requires_grad)


def copy_attributes(source: nn.Module, target: nn.Module, read: AbstractSet[str]) -> None:
    """Give ``target`` the plain attributes of ``source``, for a trace that reads them of it.

    Raises ``RuntimeError`` if code may read one of the names ``read`` that the class of ``source`` has in its own way.
    """
    own, copied = vars(source), vars(target)
    for name in copied.keys() - own.keys() - _OF_MODULES:
        del copied[name]
    copied.update((name, value) for name, value in own.items() if name not in _OF_MODULES)
    for name in sorted(read - _OF_MODULES - own.keys() - {"forward"}):
        before, now = (inspect.getattr_static(type(module), name, None) for module in (target, source))
        if before is not None and now is not None and before is not now:
            raise RuntimeError(
                f"a module was replaced after the model was wrapped, and forward reads the attribute {name} of a "
                f"module: {type(source).__name__} has another one than {type(target).__name__}, which the graph was "
                f"made with. Replace the module before the model is wrapped, or make {name} an attribute of the "
                f"object (self.{name} = ...)."
            )


def _attribute(module: nn.Module, name: str) -> Any:
    """The value of a dotted name, or ``None``."""
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


class _Slot(NamedTuple):
    """The place of a module, parameter or buffer in a container and in the module that it mirrors.

    ``runs`` is ``False`` for another name of a tied weight, in a module that no stage of this rank runs.
    """

    name: str
    key: str
    tree: dict[str, Any]
    whole: dict[str, Any]
    runs: bool = True

    @property
    def found(self) -> tuple[Any, Any]:
        """The present values in the tree and in the whole model; ``None`` for a removed one."""
        return self.tree.get(self.key), self.whole.get(self.key)


class ReplacementSync:
    """Makes each replacement in the tree in the whole model, too, and the other way round.

    Args:
        tree: containers and held modules, as ``build_local_module`` makes it.
        root: the whole model.
        named_only: names of tied weights in modules that no stage of this rank runs.
    """

    def __init__(self, tree: nn.Module, root: nn.Module, named_only: set[str] | None = None) -> None:
        self._tree, self._root = tree, root
        self._named_only = set() if named_only is None else named_only
        self._note_all()

    def _note_all(self) -> None:
        self._names: list[tuple[_Slot, tuple[Any, Any]]] = []
        self._containers: list[tuple[_Slot, tuple[Any, Any]]] = []
        self._held: list[tuple[_Slot, Any]] = []
        self._without_parameters: set[str] = set()
        self._elsewhere: list[tuple[_Slot, Any]] = []
        self._stores: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        for name, container in listings.named_modules(self._tree):
            module = self._root.get_submodule(name)
            if container is not module:
                for store in _STORES:
                    self._note(name, store.of(container), store.of(module))

    def _note(self, name: str, tree: dict[str, Any], whole: dict[str, Any]) -> None:
        self._stores.append((name, tree, whole))
        for key, value in whole.items():
            if value is None:
                continue
            full = f"{name}.{key}" if name else key
            slot = _Slot(full, key, tree, whole, full not in self._named_only)
            if key not in tree:
                self._elsewhere.append((slot, value))
            elif isinstance(value, nn.Module) and self._is_name_only(full, tree[key]):
                self._names.append((slot, slot.found))
            elif tree[key] is value:
                self._held.append((slot, value))
                if not _holds_parameters(value):
                    self._without_parameters.add(full)
            else:
                self._containers.append((slot, slot.found))

    def _is_name_only(self, name: str, module: nn.Module) -> bool:
        """Return whether ``module`` of the tree has only names of tied weights: a stage of another rank runs it."""
        names = [f"{name}.{key}" for key, _ in listings.named_parameters(module, remove_duplicate=False)]
        return bool(names) and set(names) <= set(self._named_only)

    def has_replacement_in_tree(self) -> bool:
        """Return whether a module of the tree was replaced, and not the one of the whole model."""
        return any(
            isinstance(value, nn.Module) and slot.whole.get(slot.key) is value is not slot.tree.get(slot.key)
            for slot, value in self._held
        )

    def follow(self) -> tuple[dict[str, nn.Module], bool]:
        """Make each replacement in both; return the modules that were replaced, by name, and whether stages changed.

        What takes the place of a module of another rank is freed, and has the names and modes of one process: a state
        dict has these names, and the code of forward may read the modes. A removal is undone: that rank refuses it.

        Raises:
            RuntimeError: for a removal, new parameters above the layers, two different replacements of one module, and
                a replaced container; nothing is changed then.
        """
        for slot, known in self._containers:
            if any(now is not before for now, before in zip(slot.found, known, strict=True)):
                raise RuntimeError(
                    f"{slot.name} was replaced; it is above the transformer layers or is held by several stages, and "
                    f"no stage runs it as a whole. Replace modules in it."
                )
        added = list(self._added())
        present = [_newest(slot, known) for slot, known in self._held]
        for (slot, _), value in zip(self._held, present, strict=True):
            # Also a module that has become one with parameters: nn.ModuleList().extend(...).
            if slot.name in self._without_parameters:
                _refuse_parameters(slot, value)
        replaced = {}
        for (slot, known), value in zip(self._held, present, strict=True):
            if value is not known:
                slot.tree[slot.key] = slot.whole[slot.key] = value
                if isinstance(known, nn.Module):
                    replaced[slot.name] = known
        has_changed = bool(added) or any(
            value is not known and slot.runs for (slot, known), value in zip(self._held, present, strict=True)
        )
        renamed = {}
        for slot, (tree, whole) in self._names:
            has_changed = has_changed or slot.found[0] is not tree or slot.found[1] is not whole
            new = self._with_new_names(slot, tree, whole)
            if new is not None:
                renamed[slot.name] = whole
            slot.tree[slot.key], slot.whole[slot.key] = new or (tree, whole)
        for slot, known in self._elsewhere:
            if (put := slot.whole.get(slot.key)) is not known:
                has_changed = True
                slot.whole[slot.key] = known if put is None else put
                if isinstance(known, nn.Module):
                    replaced[slot.name] = known
        for slot in added:
            slot.tree[slot.key] = slot.whole[slot.key] = next(each for each in slot.found if each is not None)
        local = {name for name, _ in listings.named_parameters(self._tree, remove_duplicate=False)}
        free_others(self._root, local, {slot.name for slot, _ in self._elsewhere})
        self._note_all()
        return replaced | renamed, has_changed

    def _with_new_names(self, slot: _Slot, tree: nn.Module, whole: nn.Module) -> tuple[nn.Module, nn.Module] | None:
        """Return what takes the place of a module of another rank, if tied weights of this rank have new names in it.

        The first has only these weights, and the second the other ones on the meta device.
        """
        new = next((each for each in slot.found if each is not tree and each is not whole), None)
        tied = set(map(id, listings.parameters(tree)))
        named = listings.named_parameters(new, remove_duplicate=False) if isinstance(new, nn.Module) else ()
        names = {f"{slot.name}.{key}" for key, parameter in named if id(parameter) in tied}
        if new is None or not names:
            return None
        self._named_only.update(names)
        return names_of_module(new, slot.name, names), new

    def _added(self) -> Iterator[_Slot]:
        """Yield what is new above the layers. Raises ``RuntimeError`` for new parameters, which no stage holds."""
        known = {(id(slot.tree), slot.key) for slot, _ in (*self._held, *self._containers, *self._names)}
        elsewhere = {(id(slot.whole), slot.key) for slot, _ in self._elsewhere}
        for name, tree, whole in self._stores:
            for key in dict.fromkeys([*whole, *tree]):
                slot = _Slot(f"{name}.{key}" if name else key, key, tree, whole)
                if (id(tree), key) in known or slot.found == (None, None):
                    continue
                if (id(whole), key) in elsewhere:
                    if key in tree:
                        raise RuntimeError(
                            f"{slot.name} was added to local_module, and another rank holds it. Replace it in the "
                            f"model that was wrapped, by the same line on every rank."
                        )
                    continue
                _refuse_parameters(slot, *slot.found)
                yield slot


def _refuse_parameters(slot: _Slot, *values: Any) -> None:
    """Raise ``RuntimeError`` for one of ``values`` with parameters, where there were none."""
    if any(map(_holds_parameters, values)):
        raise RuntimeError(
            f"{slot.name} has parameters, and nothing of that name had any when the model was wrapped: no stage holds "
            f"them. Add it before NxDPPModel(module)."
        )


def _holds_parameters(value: Any) -> bool:
    if isinstance(value, nn.Module):
        return next(listings.parameters(value), None) is not None
    return isinstance(value, nn.Parameter)


def _newest(slot: _Slot, known: Any) -> Any:
    """The value of ``slot`` that is not ``known``, if one of the two was replaced."""
    if any(value is None for value in slot.found):
        raise RuntimeError(
            f"{slot.name} was taken away, and the stages of the pipeline need it. Put something in its place, such as "
            f"an nn.Identity()."
        )
    new = {id(value): value for value in slot.found if value is not known}
    if len(new) > 1:
        raise RuntimeError(
            f"{slot.name} was replaced by one thing in local_module and by another in original_module. Replace it in "
            f"one of them; the other follows."
        )
    return next(iter(new.values()), known)

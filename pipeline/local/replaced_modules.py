"""What was replaced in a rank's part of a model since it was cut, in its own tree or in the whole model.

Parameters are listed from the tree, graphs run the modules of the whole model. Below a layer both are the same
objects; above, modules stand in two places::

    tree      lm_head ─▶ LoRA(Linear)    replaced by a hook
    model     lm_head ─▶ Linear          follows
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

_STORES = ("_modules", "_parameters", "_buffers")


class _Slot(NamedTuple):
    """A place for a module, parameter or buffer, in a vessel of the tree and in the module it stands for."""

    name: str
    key: str
    here: dict[str, Any]
    there: dict[str, Any]


class TwoPlaces:
    """Keeps alike what stands both in a rank's tree and in the whole model.

    Args:
        tree: of vessels and held modules, as ``build_local_module`` makes it.
        root: the whole model.
    """

    def __init__(self, tree: nn.Module, root: nn.Module) -> None:
        vessels = [(n, m, root.get_submodule(n)) for n, m in tree.named_modules() if m is not root.get_submodule(n)]
        slots = [slot for vessel in vessels for slot in _slots(*vessel)]
        self._vessels = [(slot, slot.here[slot.key], slot.there[slot.key]) for slot in slots if _differ(slot)]
        self._held = [(slot, slot.here[slot.key]) for slot in slots if not _differ(slot)]
        self._elsewhere = [
            (vars(module)[store], key, value)
            for _, vessel, module in vessels
            for store in _STORES
            for key, value in vars(module)[store].items()
            if key not in vars(vessel)[store]
        ]

    def follow(self) -> dict[str, nn.Module]:
        """Put what was replaced in one place into the other; the modules that were replaced, by name.

        What other ranks hold is put back: they replace it themselves.

        Raises ``RuntimeError``, before anything is changed, for what was taken away, what was replaced by two
        different things, and for a module above layers, which no stage runs.
        """
        for slot, vessel, module in self._vessels:
            if slot.here.get(slot.key) is not vessel or slot.there.get(slot.key) is not module:
                raise RuntimeError(
                    f"{slot.name} was replaced; it stands above transformer layers or is held by several stages, and "
                    f"no stage runs it as a whole. Replace modules in it."
                )
        now = [_present(slot, known) for slot, known in self._held]
        replaced = {}
        for (slot, known), present in zip(self._held, now, strict=True):
            if present is not known:
                slot.here[slot.key] = slot.there[slot.key] = present
                if isinstance(known, nn.Module):
                    replaced[slot.name] = known
        for store_there, key, value in self._elsewhere:
            store_there[key] = value
        self._held = [(slot, present) for (slot, _), present in zip(self._held, now, strict=True)]
        return replaced


def _slots(name: str, vessel: nn.Module, module: nn.Module) -> Iterator[_Slot]:
    for store in _STORES:
        here, there = vars(vessel)[store], vars(module)[store]
        for key in here:
            yield _Slot(f"{name}.{key}" if name else key, key, here, there)


def _differ(slot: _Slot) -> bool:
    return slot.here[slot.key] is not slot.there[slot.key]


def _present(slot: _Slot, known: Any) -> Any:
    """What is in the slot now: the one of two that is new."""
    found = slot.here.get(slot.key), slot.there.get(slot.key)
    if any(value is None for value in found):
        raise RuntimeError(
            f"{slot.name} was taken away, and the stages of the pipeline need it. Put something in its place, such as "
            f"an nn.Identity()."
        )
    new = {id(value): value for value in found if value is not known}
    if len(new) > 1:
        raise RuntimeError(
            f"{slot.name} was replaced by one thing in local_module and by another in original_module. Replace it in "
            f"one of them; the other follows."
        )
    return next(iter(new.values()), known)

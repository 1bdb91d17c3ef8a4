"""The optimizers of a training by name: one without a name, or several over different parameters of one model.

::

    save_checkpoint(..., optimizer=adamw)                              {"": adamw}
    save_checkpoint(..., optimizer={"muon": muon, "rest": adamw})      as it is
    save_checkpoint(..., optimizer=[muon, adamw])                      {"0": muon, "1": adamw}

A document has the groups of all, one optimizer after the other, as torch's ``get_optimizer_state_dict`` has them, and
``several`` tells where each begins.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch.optim import Optimizer

from nxdpp.checkpoint.distributed.optimizer_state import optimizer_class
from nxdpp.checkpoint.distributed.parameter_groups import SavedGroup
from nxdpp.checkpoint.files.pieces import printable

Optimizers = Mapping[str, Optimizer]


class SavedOptimizer(NamedTuple):
    """The class of an optimizer in a checkpoint, empty where it is not known, and its groups."""

    kind: str
    groups: list[SavedGroup]


def written_optimizers(saved: Mapping[str, SavedOptimizer]) -> dict[str, Any]:
    """Return the class and the groups of ``saved`` as JSON of a document, for ``saved_optimizers``.

    Raises ``ValueError`` for a parameter that two of them step.
    """
    owner: dict[str, str] = {}
    for name, each in saved.items():
        for parameter in (parameter for group in each.groups for parameter in group.names):
            if owner.setdefault(parameter, name) != name:
                raise ValueError(
                    f"the optimizers {owner[parameter]!r} and {name!r} both have {parameter}: give each parameter to "
                    f"one of them."
                )
    written: dict[str, Any] = {
        "class": ", ".join(each.kind for each in saved.values()),
        "groups": [
            {"options": group.options, "names": group.names} for each in saved.values() for group in each.groups
        ],
    }
    if "" not in saved:
        written["several"] = {name: {"class": each.kind, "groups": len(each.groups)} for name, each in saved.items()}
    return written


def saved_optimizers(content: Mapping[str, Any] | None) -> dict[str, SavedOptimizer]:
    """Return the optimizers of a document by name, whose part for optimizers is ``content``."""
    if content is None:
        return {}
    groups = [SavedGroup(**group) for group in content["groups"]]
    found, start = {}, 0
    for name, each in (content.get("several") or {"": {"class": content["class"], "groups": len(groups)}}).items():
        found[name] = SavedOptimizer(each["class"], groups[start : start + each["groups"]])
        start += each["groups"]
    return found


def fitting(optimizers: Optimizers, saved: Mapping[str, SavedOptimizer], folder: object) -> dict[str, SavedOptimizer]:
    """Return what is ``saved`` in ``folder`` for each of ``optimizers``, by name.

    A directory of torch.distributed.checkpoint has options and no classes, of all optimizers together. Raises
    ``ValueError`` for other names or classes.
    """
    if not saved:
        raise ValueError(f"{folder} has no optimizer: leave out optimizer=.")
    if saved.keys() == {""} and not saved[""].kind:
        return dict.fromkeys(optimizers, saved[""])
    if optimizers.keys() != saved.keys():
        raise ValueError(
            f"{folder} has the state of {_listed({name: each.kind for name, each in saved.items()})}, and optimizer= "
            f"is {_listed({name: optimizer_class(each) for name, each in optimizers.items()})}: give it as in the "
            f"save, or leave it out. Nothing was loaded."
        )
    for name, each in optimizers.items():
        own = optimizer_class(each)
        if saved[name].kind != own:
            which = f"the optimizer {name!r}" if name else "the optimizer"
            raise ValueError(
                f"{folder} has the state of {printable(saved[name].kind)}, and {which} is {own}: make the optimizer "
                f"that was saved, or leave out optimizer=."
            )
    return {name: saved[name] for name in optimizers}


def _listed(kinds: Mapping[str, str]) -> str:
    """The argument that has optimizers of ``kinds``."""
    if "" in kinds:
        return f"one optimizer, {printable(kinds[''])}"
    if list(kinds) == [str(number) for number in range(len(kinds))]:
        return f"a list, [{', '.join(map(printable, kinds.values()))}]"
    return f"a dict, {{{', '.join(f'{name!r:.100}: {printable(kind)}' for name, kind in kinds.items())}}}"

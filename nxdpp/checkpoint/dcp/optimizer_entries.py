"""Optimizer state as torch's ``get_optimizer_state_dict`` names it, of one process, from and to a checkpoint's content.

::

    optimizer.state.layers.0.weight.exp_avg     a tensor            } from the content's states
    optimizer.state.layers.0.weight.step        a number            }
    optimizer.param_groups.0.lr                 an option           } from its groups
    optimizer.param_groups.0.params             names of parameters }

With ``flatten_optimizer_state_dict=True`` torch gives the options of each parameter in place of groups
(``param_groups.layers.0.weight.lr``). The content is then ``flat``: it has one group for all parameters with equal
options, and a load makes the groups of its optimizer of them.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from nxdpp.checkpoint.dcp.directory import DcpDirectory, DcpObject, DcpTensor
from nxdpp.checkpoint.distributed.document import OF_OPTIMIZER
from nxdpp.checkpoint.distributed.structured import decoded, encoded, is_scalar, read_scalar, written_scalar
from nxdpp.checkpoint.files.pieces import listed, printable

_GROUPS, _STATE, _PARAMS, _NAMES = "param_groups", "state", "params", "param_names"
_NUMBERED = re.compile(r"\d{1,6}")


def torch_state(optimizer: Mapping[str, Any], order: Sequence[str], tensor: Callable[[str], Any]) -> dict[str, Any]:
    """Return the nested state dict of ``optimizer``, of a checkpoint's content.

    Args:
        order: names of parameters, in the order of the model.
        tensor: gives what stands for a tensor of the checkpoint, by its name there.
    """
    place = {name: number for number, name in enumerate(order)}
    state = {
        name: {
            key: tensor(f"{OF_OPTIMIZER}{name}.{key}") if "tensor" in each else read_scalar(each, torch.device("cpu"))
            for key, each in described.items()
        }
        for name, described in optimizer["states"].items()
    }
    groups = []
    for group in optimizer["groups"]:
        names = sorted(group["names"], key=lambda name: (place.get(name, len(place)), name))
        given = {_NAMES: names} if optimizer.get("has_names") else {}
        groups.append({**decoded(group["options"]), _PARAMS: names, **given})
    return {_STATE: state, _GROUPS: groups}


def optimizer_key(name: str) -> str:
    """The flat key of a tensor of the checkpoint in a state dict with ``torch_state`` under ``optimizer``."""
    return f"{OF_OPTIMIZER}{_STATE}.{name.removeprefix(OF_OPTIMIZER)}"


class FoundOptimizer(NamedTuple):
    """Optimizer state in a directory: its part of a checkpoint's content, and tensors by their names there.

    ``entries`` are the names in the directory.
    """

    content: dict[str, Any]
    tensors: dict[str, DcpTensor]
    entries: list[str]


def found_optimizer(directory: DcpDirectory, model: Mapping[str, DcpTensor]) -> FoundOptimizer | None:
    """Return the optimizer state of the only optimizer in ``directory``; ``None`` without one.

    Its class is not known there, and is empty. Numbers are read. ``model`` has the parameters.

    Raises ``ValueError`` for several optimizers, and for state that is not by names of parameters.
    """
    entries = {directory.keys.get(name, (name,)): each for name, each in _entries(directory).items()}
    prefixes = {path[:depth] for path in entries for depth, key in enumerate(path) if key.partition(".")[0] == _GROUPS}
    if not prefixes:
        return None
    if len(prefixes) > 1:
        raise ValueError(f"there are several optimizers: {', '.join(sorted(map('.'.join, prefixes)))}.")
    (prefix,) = prefixes
    own = {path[len(prefix) :]: each for path, each in entries.items() if path[: len(prefix)] == prefix}
    states, tensors = _states(own, model)
    groups, is_flat = _groups(
        {path: each for path, each in own.items() if path and path[0].partition(".")[0] == _GROUPS}
    )
    unknown = [name for group in groups for name in group["names"] if name not in model]
    if unknown:
        raise ValueError(
            f"the optimizer has {listed(unknown, 5)}, and the model does not: save the names of "
            f"torch.distributed.checkpoint.state_dict.get_state_dict."
        )
    content = {"class": "", "groups": groups, "states": states, "flat": is_flat}
    content["has_names"] = any(path[-1:] == (_NAMES,) for path in own)
    return FoundOptimizer(content, tensors, [each.name for each in own.values()])


def _entries(directory: DcpDirectory) -> dict[str, DcpTensor | DcpObject]:
    return {**directory.tensors, **directory.others}


def _states(
    entries: Mapping[tuple[str, ...], DcpTensor | DcpObject], model: Mapping[str, DcpTensor]
) -> tuple[dict[str, dict[str, Any]], dict[str, DcpTensor]]:
    """The description of each state by the name of its parameter, and the tensors."""
    states: dict[str, dict[str, Any]] = {}
    tensors = {}
    for path, entry in entries.items():
        kind, _, rest = ".".join(path).partition(".")
        if kind != _STATE:
            continue
        name, _, key = rest.rpartition(".")
        if isinstance(entry, DcpTensor) and entry.shape:
            described: dict[str, Any] = {"tensor": str(entry.dtype).removeprefix("torch.")}
            if name not in model or entry.shape != model[name].shape:
                described["shape"] = list(entry.shape)
            tensors[f"{OF_OPTIMIZER}{name}.{key}"] = entry
        else:
            value = entry.read()
            if not is_scalar(value):
                raise ValueError(f"the state {key!r} of {printable(name)} is a {type(value).__name__}, and no number.")
            described = dict(written_scalar(value))
        states.setdefault(name, {})[key] = described
    return states, tensors


def _groups(entries: Mapping[tuple[str, ...], DcpTensor | DcpObject]) -> tuple[list[dict[str, Any]], bool]:
    """The groups, and whether they are made of the options of parameters."""
    found: dict[str, dict[str, Any]] = {}
    flat: dict[str, dict[str, Any]] = {}
    for path, entry in entries.items():
        first, *rest = path
        if first == _GROUPS and rest and _NUMBERED.fullmatch(rest[0]):
            found.setdefault(rest[0], {})[".".join(rest[1:])] = entry.read()
        else:
            name, _, key = ".".join(path).partition(".")[2].rpartition(".")
            flat.setdefault(name, {})[key] = entry.read()
    for name, options in flat.items():
        text = json.dumps(encoded(options, _GROUPS))
        found.setdefault(text, {**options, _PARAMS: []})[_PARAMS].append(name)
    groups = []
    for number, (_, options) in enumerate(sorted(found.items(), key=_order)):
        names = options.pop(_PARAMS, None)
        options.pop(_NAMES, None)
        if not isinstance(names, list) or any(type(name) is not str for name in names):
            raise ValueError(
                f"param_groups[{number}] has the parameters {names!r:.100}, and no names: save what "
                f"torch.distributed.checkpoint.state_dict.get_state_dict returns."
            )
        groups.append({"options": encoded(options, f"{_GROUPS}[{number}]"), "names": names})
    return groups, bool(flat)


def _order(item: tuple[str, Any]) -> int:
    """Groups with numbers in their order, others as they come."""
    return int(item[0]) if _NUMBERED.fullmatch(item[0]) else 0

"""Values of a program as JSON: what users, schedulers and scalers keep, without pickle.

Loading such a document runs no code of it. Numbers, strings, ``None``, lists and dicts with strings as keys are those
of JSON; others have a mark::

    (1, 2)              {"$tuple": [1, 2]}
    {3: "a"}            {"$dict": [[3, "a"]]}
    inf                 {"$float": "inf"}
    tensor              {"$tensor": "user_content.mask"}, or {"$scalar": ...} for a number
"""

import base64
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from nxdpp.checkpoint.distributed.scalars import dtype_named, is_scalar, read_scalar, written_scalar

_FLOATS = ("nan", "inf", "-inf")
_DICTS: dict[type, str] = {Counter: "$counter", OrderedDict: "$ordered", dict: "$dict"}
_SEQUENCES: dict[type, str] = {tuple: "$tuple", set: "$set", frozenset: "$frozenset", torch.Size: "$size"}
_MAKERS: dict[str, Callable[[Any], Any]] = {
    **{mark: kind for kind, mark in _DICTS.items()},
    **{mark: kind for kind, mark in _SEQUENCES.items()},
}


def encoded(value: Any, path: str, tensors: dict[str, torch.Tensor] | None = None) -> Any:
    """Return ``value`` as JSON.

    Args:
        value: numbers, strings, bytes, tensors, dtypes, devices, and containers of them. Scalars of NumPy become those
            of Python.
        path: name of ``value``, for errors and for its tensors.
        tensors: gets tensors and arrays by name. Without it only tensors without dimensions are taken.

    Raises ``ValueError`` for a value of another type, with its path.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return {"$float": str(float(value))} if str(float(value)) in _FLOATS else float(value)
    if isinstance(value, torch.Tensor | np.ndarray):
        return _encoded_tensor(value, path, tensors)
    if type(value) is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype | torch.device):
        return {f"${type(value).__name__}": str(value).removeprefix("torch.")}
    if type(value) is list:
        return [encoded(each, f"{path}[{number}]", tensors) for number, each in enumerate(value)]
    if type(value) in _SEQUENCES:
        return {_SEQUENCES[type(value)]: [encoded(each, f"{path}[{n}]", tensors) for n, each in enumerate(value)]}
    if type(value) in _DICTS:
        if type(value) is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: encoded(each, f"{path}.{key}", tensors) for key, each in value.items()}
        pairs = [
            [encoded(key, f"a key of {path}"), encoded(each, f"{path}[{key!r}]", tensors)]
            for key, each in value.items()
        ]
        return {_DICTS[type(value)]: pairs}
    raise ValueError(
        f"{path} is a {type(value).__name__}, which a checkpoint cannot hold: it has numbers, strings, bytes, tensors, "
        f"lists, tuples, sets and dicts. Give its content in these, or leave it out."
    )


def decoded(saved: Any, tensors: Mapping[str, torch.Tensor] | None = None) -> Any:
    """Return the value of which ``encoded`` made ``saved``; ``tensors`` has those by name.

    Raises ``ValueError`` for a mark that ``encoded`` does not make.
    """
    if isinstance(saved, list):
        return [decoded(each, tensors) for each in saved]
    if not isinstance(saved, dict):
        return saved
    mark = next(iter(saved), "")
    if not mark.startswith("$"):
        return {key: decoded(each, tensors) for key, each in saved.items()}
    if len(saved) > 1:
        raise ValueError(f"the mark {mark!r} has others beside it: the document is damaged.")
    content = saved[mark]
    if mark in _MAKERS:
        items = decoded(content, tensors)
        if mark in _DICTS.values():
            return _MAKERS[mark](dict(items))
        return _MAKERS[mark](items)
    if mark == "$float":
        return float(content)
    if mark == "$bytes":
        return base64.b64decode(content)
    if mark == "$dtype":
        return dtype_named(content)
    if mark == "$device":
        return torch.device(content)
    if mark == "$scalar":
        return read_scalar(content, torch.device("cpu"))
    if mark in ("$tensor", "$array") and tensors is not None:
        return tensors[content] if mark == "$tensor" else tensors[content].numpy()
    raise ValueError(f"the mark {mark!r} is not known: the document is damaged, or was not written by nxdpp.")


def _encoded_tensor(value: Any, path: str, tensors: dict[str, torch.Tensor] | None) -> Any:
    if isinstance(value, torch.Tensor) and is_scalar(value):
        return {"$scalar": written_scalar(value)}
    if tensors is None:
        raise ValueError(f"{path} is a tensor of shape {list(value.shape)}, and only numbers can be there.")
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            raise ValueError(f"{path} is a tensor of layout {value.layout}, which a checkpoint cannot hold: {_DENSE}")
        if value.is_meta:
            raise ValueError(f"{path} is a tensor on the meta device, which has no values.")
        tensors[path] = value.detach()
        return {"$tensor": path}
    try:
        tensors[path] = torch.from_numpy(np.ascontiguousarray(value))
    except TypeError as error:
        raise ValueError(f"{path} is an array of {value.dtype}, which a checkpoint cannot hold: {_DENSE}") from error
    return {"$array": path}


_DENSE = "give a dense one of numbers."

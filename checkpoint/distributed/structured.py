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
from nxdpp.checkpoint.files.checksummed import holds_dtype
from nxdpp.devices.kinds import readable

_NUMPY = (np.bool_, np.integer, np.floating, np.str_, np.bytes_)
_LEVELS = 200
"""Of containers in containers: Python's own limit is reached later, in a save and in a load."""
_LONGEST_INTEGER = 10_000
"""Bits; Python reads a number of 4300 digits at most."""
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
    return _encoded(value, path, tensors, _LEVELS)


def _encoded(value: Any, path: str, tensors: dict[str, torch.Tensor] | None, levels: int) -> Any:
    if isinstance(value, _NUMPY):
        value = value.item()
    if levels < 0:
        raise ValueError(
            f"{path:.100}... has more than {_LEVELS} levels of containers, which a checkpoint cannot hold."
        )
    if type(value) is int and value.bit_length() > _LONGEST_INTEGER:
        raise ValueError(f"{path} is a number of more than {_LONGEST_INTEGER} bits, which a checkpoint cannot hold.")
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
        return [_encoded(each, f"{path}[{number}]", tensors, levels - 1) for number, each in enumerate(value)]
    if type(value) in _SEQUENCES:
        return {
            _SEQUENCES[type(value)]: [
                _encoded(each, f"{path}[{n}]", tensors, levels - 1) for n, each in enumerate(value)
            ]
        }
    if type(value) in _DICTS:
        if type(value) is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _encoded(each, f"{path}.{key}", tensors, levels - 1) for key, each in value.items()}
        pairs = [
            [
                _encoded(key, f"a key of {path}", None, levels - 1),
                _encoded(each, f"{path}[{key!r}]", tensors, levels - 1),
            ]
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
    if mark == "$device" and isinstance(content, str):
        return torch.device(content)
    if mark == "$scalar":
        return read_scalar(content, torch.device("cpu"))
    if mark in ("$tensor", "$array") and tensors is not None:
        return tensors[content] if mark == "$tensor" else tensors[content].numpy()
    raise ValueError(f"the mark {mark!r} is not known: the document is damaged, or was not written by nxdpp.")


def _encoded_tensor(value: torch.Tensor | np.ndarray, path: str, tensors: dict[str, torch.Tensor] | None) -> Any:
    if isinstance(value, torch.Tensor) and is_scalar(value) and holds_dtype(value.dtype):
        return {"$scalar": written_scalar(value)}
    if tensors is None:
        raise ValueError(f"{path} is a tensor of shape {list(value.shape)}, and only numbers can be there.")
    name = path
    while name in tensors:
        # Other keys can make the same path: {"a.b": ...} and {"a": {"b": ...}}.
        name += "'"
    tensors[name] = _dense(value, path)
    return {"$tensor" if isinstance(value, torch.Tensor) else "$array": name}


def _dense(value: torch.Tensor | np.ndarray, path: str) -> torch.Tensor:
    """``value`` as a tensor that a file can have. Raises ``ValueError`` for others."""
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            raise ValueError(f"{path} is a tensor of layout {value.layout}, which a checkpoint cannot hold: {_DENSE}")
        if value.is_meta:
            raise ValueError(f"{path} is a tensor on the meta device, which has no values.")
        found = readable(value.detach())
    else:
        if type(value) is not np.ndarray:
            raise ValueError(f"{path} is a {type(value).__name__}, which a checkpoint cannot hold: {_DENSE}")
        try:
            # An array without dimensions gets one when it is made contiguous.
            found = torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{path} is an array of {value.dtype}, which a checkpoint cannot hold: {_DENSE}"
            ) from error
    if not holds_dtype(found.dtype):
        raise ValueError(f"{path} is of {found.dtype}, which a checkpoint cannot hold: {_DENSE}")
    return found


_DENSE = "give a dense one of numbers."

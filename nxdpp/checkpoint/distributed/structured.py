"""Values of a program as JSON: what users, schedulers and scalers keep, without pickle.

Loading such a document runs no code from it. Numbers, strings, ``None``, lists and dicts with strings as keys are
plain JSON; other values have a mark::

    (1, 2)              {"$tuple": [1, 2]}
    {3: "a"}            {"$dict": [[3, "a"]]}
    inf                 {"$float": "inf"}
    tensor              {"$tensor": "user_content.mask"}, or {"$scalar": ...} for a number

An optimizer's state has such numbers too, ``step`` for one. JSON holds them exactly.
"""

import base64
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from nxdpp.checkpoint.files.checksummed_writer import holds_dtype
from nxdpp.devices.kinds import readable

_NUMPY = (np.bool_, np.integer, np.floating, np.str_, np.bytes_)
_DENSE = "give a dense one of numbers."
_LEVELS = 200
"""Of containers in containers: Python's own limit is reached later, in a save and in a load."""
_LONGEST_INTEGER = 10_000
"""Bits; Python reads a number of 4300 digits at most."""
_WORDS = ("nan", "inf", "-inf")
Scalar = dict[str, Any]
"""``{"number": 3.0}``, with ``"dtype": "float32"`` where the number was in a tensor without dimensions."""
_DICTS: dict[type, str] = {Counter: "$counter", OrderedDict: "$ordered", dict: "$dict"}
_SEQUENCES: dict[type, str] = {tuple: "$tuple", set: "$set", frozenset: "$frozenset", torch.Size: "$size"}
_MAKERS: dict[str, Callable[[Any], Any]] = {
    **{mark: kind for kind, mark in _DICTS.items()},
    **{mark: kind for kind, mark in _SEQUENCES.items()},
}


def encoded(value: Any, path: str, tensors: dict[str, torch.Tensor] | None = None) -> Any:
    """Return ``value`` as JSON; ``path`` is its name, for errors and for its tensors.

    It may be numbers, strings, bytes, tensors, dtypes, devices, and containers of them. Scalars of NumPy become Python
    scalars. ``tensors`` gets tensors and arrays by name. Without it only tensors without dimensions are taken. Raises
    ``ValueError`` for a value of any other type, with its path.
    """
    return _encoded(value, path, tensors, _LEVELS)


def _encoded(value: Any, path: str, tensors: dict[str, torch.Tensor] | None, levels: int) -> Any:
    def inner(each: Any, place: str) -> Any:
        return _encoded(each, place, tensors, levels - 1)

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
        return {"$float": str(float(value))} if str(float(value)) in _WORDS else float(value)
    if isinstance(value, torch.Tensor | np.ndarray):
        return _encoded_tensor(value, path, tensors)
    if type(value) is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype | torch.device):
        return {f"${type(value).__name__}": str(value).removeprefix("torch.")}
    if type(value) is list:
        return [inner(each, f"{path}[{number}]") for number, each in enumerate(value)]
    if type(value) in _SEQUENCES:
        return {_SEQUENCES[type(value)]: [inner(each, f"{path}[{number}]") for number, each in enumerate(value)]}
    if type(value) in _DICTS:
        if type(value) is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: inner(each, f"{path}.{key}") for key, each in value.items()}
        keys = [_encoded(key, f"a key of {path}", None, levels - 1) for key in value]
        values = [inner(each, f"{path}[{key!r}]") for key, each in value.items()]
        return {_DICTS[type(value)]: list(map(list, zip(keys, values, strict=True)))}
    raise ValueError(
        f"{path} is a {type(value).__name__}, which a checkpoint cannot hold: it has numbers, strings, bytes, tensors, "
        f"lists, tuples, sets and dicts. Give its content in these, or leave it out."
    )


def decoded(saved: Any, tensors: Mapping[str, torch.Tensor] | None = None) -> Any:
    """Return the value of which ``encoded`` made ``saved``; ``ValueError`` for a mark that it does not make."""
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
    """``value`` as a tensor that a file can have. Raises ``ValueError`` where it cannot."""
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


def is_scalar(value: Any) -> bool:
    """Return whether ``value`` is a number, ``None``, or a tensor without dimensions of a dtype that JSON can hold."""
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 and not value.is_complex()
    return value is None or isinstance(value, bool | int | float)


def written_scalar(value: Any) -> Scalar:
    """Return the JSON form of a value for which ``is_scalar`` is true."""
    number = value.item() if isinstance(value, torch.Tensor) else value
    if isinstance(number, float) and str(number) in _WORDS:
        number = str(number)
    if isinstance(value, torch.Tensor):
        return {"number": number, "dtype": str(value.dtype).removeprefix("torch.")}
    return {"number": number}


def read_scalar(saved: Scalar, device: torch.device) -> Any:
    """Return the value of a JSON form; a tensor is on ``device``."""
    number = saved["number"]
    if number in _WORDS:
        number = float(number)
    dtype = saved.get("dtype")
    return number if dtype is None else torch.tensor(number, dtype=dtype_named(dtype), device=device)


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype of a name without ``torch.``; raises ``ValueError`` for an unknown name."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of torch: the document is damaged.")
    return found

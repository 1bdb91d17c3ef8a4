"""The fixed form of values that go between ranks: numbers, text, bytes, tensors, and containers of them.

A reader makes values from it and runs no code: a stranger who writes to the store cannot make a rank run a command.
The form is a JSON text, followed by the bytes of tensors and of ``bytes``::

    8 bytes       n bytes                                              the rest
    n, little     {"tuple": [3, {"tensor": ["float32", [2, 2], 0]}]}   16 bytes of the tensor
    endian

Instances are of dataclasses, named tuples and enumerations, and of subclasses of dicts, lists and tuples, which both
ranks have imported. Their ``__init__`` does not run. Results of torch (``torch.return_types.max``) are among them. A
writer makes each instance as a reader would, and so refuses what a reader could not make.
"""

import dataclasses
import json
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

from nxdpp.ground.torch_names import pytree

_LENGTH = 8
_PLAIN = (bool, int, str)
_SEQUENCES: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset, "size": torch.Size}
_MARKS: dict[type, str] = {kind: mark for mark, kind in _SEQUENCES.items()}
_OF_TORCH: dict[type, str] = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format"}
_CONTAINERS = (dict, list, tuple)


def packed(value: Any, with_tensors: bool = True) -> bytes:
    """Return the form of ``value``.

    Raises ``TypeError`` for a value that has none, with its type: a tensor too, unless it may be ``with_tensors``.
    """
    blobs: list[bytes] = []
    text = json.dumps(_Writer(blobs, with_tensors).form_of(value)).encode()
    return b"".join([len(text).to_bytes(_LENGTH, "little"), text, *blobs])


def unpacked(form: bytes) -> Any:
    """Return the value of a form. Raises ``ValueError`` for bytes that are none."""
    try:
        length = int.from_bytes(form[:_LENGTH], "little")
        text = form[_LENGTH : _LENGTH + length].decode()
        return _Reader(form[_LENGTH + length :]).value_of(json.loads(text))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        raise ValueError(f"another rank, or a stranger, sent bytes that are no value: {error!r:.200}") from error


class _Writer:
    def __init__(self, blobs: list[bytes], with_tensors: bool) -> None:
        self._blobs = blobs
        self._with_tensors = with_tensors
        self._size = 0

    def form_of(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in _PLAIN or kind is float:
            return value
        if kind is list:
            return [self.form_of(each) for each in value]
        if kind is dict:
            return {"dict": self._items(value)}
        if kind in _MARKS:
            return {_MARKS[kind]: [self.form_of(each) for each in value]}
        if kind in _OF_TORCH:
            return {_OF_TORCH[kind]: str(value).removeprefix("torch.")}
        if isinstance(value, bytes | bytearray):
            return {"bytes": self._add(bytes(value))}
        if isinstance(value, torch.Tensor):
            return {"tensor": self._tensor(value)}
        if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
            return {"array": [value.dtype.str, list(value.shape), self._add(value.tobytes()), kind is np.ndarray]}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if isinstance(value, PurePath):
            return {"path": str(value)}
        if isinstance(value, slice | range):
            return {kind.__name__: [self.form_of(each) for each in (value.start, value.stop, value.step)]}
        if isinstance(value, complex):
            return {"complex": [value.real, value.imag]}
        if isinstance(value, type) and issubclass(value, Exception):
            return {"error": _name_of(value)}
        if isinstance(value, Exception):
            file = [value.filename] if isinstance(value, OSError) and value.filename is not None else []
            return {"raised": [*_name_of(kind), self.form_of([*value.args, *file])]}
        return {"instance": self._instance(value)}

    def _instance(self, value: Any) -> list[Any]:
        kind = type(value)
        name = _name_of(kind)
        fields = _fields_of(value)
        if not _is_plain(kind) or _class_of(*name) is not kind or not _can_be_made(value, fields):
            raise TypeError(f"a {kind.__module__}.{kind.__qualname__} has no form in which it goes to other ranks")
        if isinstance(value, Enum):
            return [*name, value.name]
        content = self._items(value) if isinstance(value, dict) else None
        if isinstance(value, list | tuple):
            content = [self.form_of(each) for each in value]
        return [*name, content, self._items(fields)]

    def _items(self, value: dict[Any, Any]) -> list[Any]:
        return [[self.form_of(key), self.form_of(each)] for key, each in value.items()]

    def _tensor(self, tensor: torch.Tensor) -> list[Any]:
        is_plain = tensor.layout == torch.strided and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        if not (is_plain and self._with_tensors):
            raise TypeError(f"a {type(tensor).__name__} of {tensor.layout} has no form in which it goes to other ranks")
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
        dtype = str(tensor.dtype).removeprefix("torch.")
        return [dtype, list(tensor.shape), self._add(flat.numpy().tobytes())]

    def _add(self, blob: bytes) -> list[int]:
        place = [self._size, len(blob)]
        self._blobs.append(blob)
        self._size += len(blob)
        return place


class _Reader:
    def __init__(self, blobs: bytes) -> None:
        self._blobs = blobs

    def value_of(self, form: Any) -> Any:
        if isinstance(form, list):
            return [self.value_of(each) for each in form]
        if not isinstance(form, dict):
            return form
        ((mark, content),) = form.items()
        if mark in _SEQUENCES:
            return _SEQUENCES[mark](self.value_of(content))
        makers: dict[str, Callable[[Any], Any]] = {
            "dict": self._items,
            "bytes": self._blob,
            "tensor": lambda content: self._tensor(*content),
            "array": lambda content: self._array(*content),
            "device": torch.device,
            "path": Path,
            "slice": lambda content: slice(*self.value_of(content)),
            "range": lambda content: range(*self.value_of(content)),
            "complex": lambda content: complex(*content),
            "error": lambda content: _error_class(*content),
            "raised": lambda content: _error_class(*content[:2])(*self.value_of(content[2])),
            "instance": lambda content: self._instance(*content),
            **{mark: partial(_of_torch, kind) for kind, mark in _OF_TORCH.items()},
        }
        return makers[mark](content)

    def _instance(self, module: str, name: str, content: Any, fields: Any = None) -> Any:
        kind = _class_of(module, name)
        if not _is_plain(kind):
            raise TypeError(f"{module}.{name} is no plain class")
        if issubclass(kind, Enum):
            return kind[content]
        items = self._items(content) if issubclass(kind, dict) else self.value_of(content)
        return _made(kind, items, self._items(fields))

    def _items(self, content: Sequence[Sequence[Any]]) -> dict[Any, Any]:
        return {self.value_of(key): self.value_of(value) for key, value in content}

    def _blob(self, place: Sequence[int]) -> bytes:
        start, length = place
        blob = self._blobs[start : start + length]
        if start < 0 or len(blob) != length:
            raise ValueError("the end is missing")
        return blob

    def _tensor(self, dtype: str, shape: list[int], place: Sequence[int]) -> torch.Tensor:
        made = torch.empty(shape, dtype=_of_torch(torch.dtype, dtype), device="cpu")
        if made.numel():
            made.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(self._blob(place)), dtype=torch.uint8))
        return made

    def _array(self, dtype: str, shape: list[int], place: Sequence[int], is_array: bool) -> Any:
        array = np.frombuffer(bytearray(self._blob(place)), dtype=np.dtype(dtype)).reshape(shape)
        return array if is_array else array[()]


def _name_of(kind: type) -> list[str]:
    return [kind.__module__, kind.__qualname__]


def _class_of(module: str, name: str) -> Any:
    """The class ``name`` of a module that is imported; ``None`` if there is none."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _is_plain(kind: Any) -> bool:
    """Return whether an instance of ``kind`` is its fields or items, and no code runs when it ends."""
    if not isinstance(kind, type) or hasattr(kind, "__del__"):
        return False
    return dataclasses.is_dataclass(kind) or issubclass(kind, (Enum, *_CONTAINERS))


def _fields_of(value: Any) -> dict[str, Any]:
    """The attributes of an instance by name; of a structure of C, such as a result of torch, those behind its items."""
    if pytree.is_structseq_instance(value):
        return dict(value.__reduce__()[1][1])
    slots = (slot for each in type(value).__mro__ for slot in getattr(each, "__slots__", ()))
    return {**getattr(value, "__dict__", {}), **{slot: getattr(value, slot) for slot in slots if hasattr(value, slot)}}


def _made(kind: Any, items: Any, fields: dict[str, Any]) -> Any:
    """Return an instance with these items and attributes. Raises for a class whose instances need its own code."""
    if pytree.is_structseq_class(kind):
        # These have no ``tuple.__new__``. No class of Python is one of them, so that only C runs.
        return kind(items, fields)
    if issubclass(kind, tuple):
        made = tuple.__new__(kind, items)
    elif issubclass(kind, list):
        made = list.__new__(kind)
        list.extend(made, items)
    elif issubclass(kind, dict):
        base = OrderedDict if issubclass(kind, OrderedDict) else dict
        made = base.__new__(kind)
        for key, value in items.items():
            base.__setitem__(made, key, value)
    else:
        made = object.__new__(kind)
    for field, value in fields.items():
        object.__setattr__(made, field, value)
    return made


def _can_be_made(value: Any, fields: dict[str, Any]) -> bool:
    """Return whether a reader can make ``value``, an instance of a plain class."""
    if isinstance(value, Enum):
        # Flags that are a sum of members have no member's name.
        return type(value).__members__.get(value.name) is value
    try:
        _made(type(value), value, fields)
    except (TypeError, ValueError, AttributeError):
        return False
    return True


def _error_class(module: str, name: str) -> type[Exception]:
    kind = _class_of(module, name)
    is_known = module == "builtins" or module.startswith("nxdpp.")
    if not (is_known and isinstance(kind, type) and issubclass(kind, Exception)):
        raise TypeError(f"{module}.{name} is no class of errors")
    return kind


def _of_torch(kind: type, name: str) -> Any:
    value = getattr(torch, name)
    if not isinstance(value, kind):
        raise TypeError(f"torch.{name} is no {kind.__name__}")
    return value

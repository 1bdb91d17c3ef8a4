"""Arguments of the trainer: a YAML file, the command line over it, dataclasses of both, and the objects that they name.

::

    -f train.yaml --max_epochs 2 --model.args.dim=32     a later value replaces an earlier one
    {__type: name, ...}, {__value_type: str, value: 1}   an object of a class, and a value of a type
"""

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from pydoc import locate
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import yaml  # type: ignore[import-untyped]

T = TypeVar("T")


def read_arguments(argv: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of the command line ``[-f FILE] [--name.of.argument VALUE ...]`` as nested dicts.

    Raises ``ValueError`` for a value without a name, for parts of a list, and for a file that is no YAML dict.
    """
    words, arguments = list(argv), dict[str, Any]()
    if words[:1] == ["-f"]:
        read = yaml.safe_load(Path(words[1]).read_text()) if len(words) > 1 else None
        if not isinstance(read, dict):
            raise ValueError(f"{' '.join(words[:2])} must name a YAML file with names and values")
        arguments = read
        words = words[2:]
    while words:
        name, equals, value = words.pop(0).partition("=")
        if not name.startswith("--"):
            raise ValueError(f"{name!r} belongs to no argument: give --name VALUE or --name=VALUE")
        is_flag = not equals and (not words or words[0].startswith("--"))
        *path, last = name[2:].replace("-", "_").split(".")
        inner: Any = arguments
        for key in path:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                raise ValueError(f"{name}: {key} is {inner!r:.80}, of which the command line changes no part")
        inner[last] = True if is_flag else value if equals else words.pop(0)
    return arguments


def build(kind: type[T], given: Any, refused: Mapping[str, str | None], where: str = "") -> T:
    """Return the dataclass ``kind`` of the values ``given``, which may be text.

    Args:
        kind: a dataclass.
        given: values by name, or an object of ``kind``.
        refused: why each refused argument is, by dotted name. ``None`` for one that has no effect.
        where: dotted name of ``given`` with a dot at its end.

    Raises ``ValueError`` for unknown or refused arguments, values that are not of their type, and references.
    """
    if isinstance(given, kind):
        return given
    if found := re.search(r"\$!?[({][^)}]*.?", str(plain(given))):
        raise ValueError(f"{found[0]} refers to another argument, which this trainer does not follow: give the value")
    name = where.rstrip(".") or "the trainer"
    if not isinstance(given, Mapping):
        raise ValueError(f"{name} must have names and values, not {given!r:.80}")
    hints = get_type_hints(kind)
    values = {}
    for key, value in given.items():
        path = f"{where}{key}"
        if path in refused:
            if value and refused[path]:
                raise ValueError(f"{path}={value!r:.80} is refused: {refused[path]}")
        elif key not in hints:
            raise ValueError(f"there is no argument {path}: {name} has {', '.join(hints)}")
        elif value is not None:
            values[key] = _typed(hints[key], value, refused, path)
    return kind(**values)


def _typed(hint: Any, value: Any, refused: Mapping[str, str | None], path: str) -> Any:
    is_text = isinstance(value, str) and str in get_args(hint)
    for option in (hint, *get_args(hint)):
        if is_dataclass(option) and get_origin(hint) is not list and not is_text:
            return build(option, value, refused, f"{path}.")  # type: ignore[arg-type]  # a class
    value = value if hint is str else _guessed(value)
    options = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    kinds = tuple(get_origin(option) or option for option in options)
    allowed = (*kinds, int) if float in kinds else kinds
    # A bool is no number.
    if Any not in kinds and not (type(value) in kinds if isinstance(value, bool) else isinstance(value, allowed)):
        raise ValueError(f"{path}={value!r:.80} must be of type {getattr(hint, '__name__', hint)}")
    if get_origin(hint) is list:
        return [build(get_args(hint)[0], each, refused, f"{path}.{number}.") for number, each in enumerate(value)]
    return value


def _guessed(value: Any) -> Any:
    """``value`` with its texts as Python would read them: numbers, lists, true and false. Other texts stay."""
    if isinstance(value, dict):
        is_typed = value.keys() == {"__value_type", "value"}
        return value if is_typed else {key: _guessed(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_guessed(each) for each in value]
    if not isinstance(value, str):
        return value
    try:
        return {"true": True, "false": False}[value] if value in ("true", "false") else ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return value


def named_object(name: Any) -> Any:
    """Return the class or function of a full name such as ``torch.optim.Adam``; an object is returned as it is.

    Raises ``ValueError`` for a name that leads nowhere. An error while its module is imported is passed on.
    """
    found = locate(name) if isinstance(name, str) else name
    if found is None:
        raise ValueError(f"{name!r} is not the full name of a class or function that can be imported")
    return found


def plain(value: Any) -> Any:
    """Return ``value`` of dicts, lists, numbers and texts only, equal on all ranks.

    Functions and classes are their full names, other objects their ``repr``, or their class where it has an address.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {key if type(key) is int else str(key): plain(each) for key, each in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, list | tuple):
        return [plain(each) for each in value] if isinstance(value, list) else tuple(map(plain, value))
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if not callable(value) and " at 0x" not in (text := repr(value)):
        return text
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def made(value: Any) -> Any:
    """Return ``value`` with objects in the place of dicts that have ``__type`` or ``__value_type``."""
    if isinstance(value, list | tuple):
        return type(value)(map(made, value))
    if not isinstance(value, Mapping):
        return value
    values = {name: made(each) for name, each in value.items()}
    if "__type" in values:
        return named_object(values.pop("__type"))(**values)
    if "__value_type" in values:
        kind = values["__value_type"]
        return named_object(values["value"]) if kind == "function" else named_object(kind)(values["value"])
    return values

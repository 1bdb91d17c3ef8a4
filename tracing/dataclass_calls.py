"""Functions of ``dataclasses`` on a dataclass that a module returned: its class is known, its fields are values.

A run on fake tensors gives the class. It answers ``fields(out)``, ``is_dataclass(out)`` and ``vars(out)``, and
``replace(out, hidden=h)`` makes an object of it. ``asdict`` and ``astuple`` are nodes.
"""

import builtins
import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from torch import fx

from nxdpp.tracing.calls import recorded
from nxdpp.tracing.swap import swapped_in_this_thread
from nxdpp.tracing.type_answers import class_of

_FUNCTIONS: tuple[Any, ...] = (
    dataclasses.replace, dataclasses.asdict, dataclasses.astuple, dataclasses.fields, dataclasses.is_dataclass,
)  # fmt: skip


def traced_vars(*values: Any) -> dict[str, Any]:
    """``vars()`` of a dataclass that a module returned, or of any other object.

    Raises ``RuntimeError`` for another traced value.
    """
    if not values or not issubclass(type(values[0]), fx.Proxy):
        own: dict[str, Any] = builtins.vars(*values)
        return own
    value: Any = values[0]
    if value.tracer.is_tensor(value.node):
        raise RuntimeError("forward reads vars() of a tensor between layers. Name its attributes: value.name.")
    # For inputs of unknown shapes the class may be unknown, too, and Python raises.
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(class_of(value))}


@contextmanager
def recorded_dataclasses(sources: Iterable[ModuleType]) -> Iterator[None]:
    """Follow the functions of ``dataclasses``, also under their names in ``sources``."""
    replace, asdict, astuple, fields, is_dataclass = _FUNCTIONS
    changes = {id(function): recorded(function) for function in (asdict, astuple)}

    def replace_fields(obj: Any, /, **values: Any) -> Any:
        if not issubclass(type(obj), fx.Proxy):
            return replace(obj, **values)
        cls = class_of(obj)
        others = [each.name for each in fields(cls) if each.init and each.name not in values]
        return cls(**{name: getattr(obj, name) for name in others}, **values)

    def fields_of(class_or_instance: Any) -> Any:
        value = class_or_instance
        return fields(class_of(value) if issubclass(type(value), fx.Proxy) else value)

    def is_one(obj: Any) -> Any:
        return is_dataclass(class_of(obj) if issubclass(type(obj), fx.Proxy) else obj)

    changes |= {id(replace): replace_fields, id(fields): fields_of, id(is_dataclass): is_one}
    with ExitStack() as stack:
        for source in (dataclasses, *sources):
            namespace = builtins.vars(source)
            found = {name: changes[id(value)] for name, value in namespace.items() if id(value) in changes}
            stack.enter_context(swapped_in_this_thread(namespace, found))
        yield

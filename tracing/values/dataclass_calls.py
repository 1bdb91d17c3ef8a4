"""Functions of ``dataclasses`` on a dataclass that a module returned: its class is known, its fields are values.

A run on fake tensors gives the class. It answers ``fields(out)`` and ``is_dataclass(out)``, and
``replace(out, hidden=h)`` makes an object of it. ``asdict`` and ``astuple`` are nodes.
"""

import dataclasses
from collections.abc import Iterable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

from torch import fx

from nxdpp.tracing.graph.calls import recorded
from nxdpp.tracing.graph.swap import replaced
from nxdpp.tracing.values.type_answers import class_of

_FUNCTIONS: tuple[Any, ...] = (
    dataclasses.replace, dataclasses.asdict, dataclasses.astuple, dataclasses.fields, dataclasses.is_dataclass,
)  # fmt: skip


def recorded_dataclasses(sources: Iterable[ModuleType]) -> AbstractContextManager[None]:
    """Follow the functions of ``dataclasses`` in ``sources``, under any name.

    The module itself stays as it is: the tracer asks ``is_dataclass`` of each value.
    """
    replace, asdict, astuple, fields, is_dataclass = _FUNCTIONS
    changes: dict[int, Any] = {id(function): recorded(function) for function in (asdict, astuple)}

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
    module = ModuleType(dataclasses.__name__)
    own = vars(dataclasses)
    vars(module).update(own, **{name: changes[id(own[name])] for name in own if id(own[name]) in changes})
    return replaced(map(vars, sources), {**changes, id(dataclasses): module})

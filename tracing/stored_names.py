"""Names of attributes that the forwards of modules store, read from their code.

The code of ``forward``, of hooks, and of every function whose name occurs in that code is searched. A name that is
stored on ``self`` belongs to modules of that class; one that is stored on another object may belong to any module.
"""

import dis
import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

# Their code stores no results on modules that a model reads.
_LIBRARIES = re.compile(r"(torch|numpy|nxdpp|einops|transformers(?!\.models\.))(\.|$)")
_FOUNDATIONS = ("torch", "builtins")
_OPCODES = frozenset({dis.opmap["STORE_ATTR"], dis.opmap["DELETE_ATTR"]})
_REGISTER = "register_buffer"
_BY_STRING = frozenset({"setattr", "delattr", "__setattr__", "__delattr__", _REGISTER})
_DICTIONARIES = frozenset({"__dict__", "vars"})
_BUILD_STRING = dis.opmap["BUILD_STRING"]
# Marks a text that is part of a name.
_PART = "*"
_ROPE_UTILS = "transformers/modeling_rope_utils.py"
_STORE_ITEM = dis.opmap["STORE_SUBSCR"]


@dataclass(frozen=True)
class StoredNames:
    """Names that a run of modules may store.

    Attributes:
        on_self: of each class, the names that its code stores on ``self``.
        on_others: names that some code stores on another object.
    """

    on_self: dict[type, frozenset[str]]
    on_others: frozenset[str]

    def of(self, module: nn.Module) -> frozenset[str]:
        """Names that a run may store on ``module``."""
        return self.on_self.get(type(module), frozenset()) | self.on_others

    def stores(self, module: nn.Module, name: str) -> bool:
        """Return whether a run may store that name on ``module``."""
        names = self.of(module)
        return name in names or any(n[:1] == _PART and n[1:] in name for n in names)

    def has_from_construction(self, module: nn.Module, name: str) -> bool:
        """Return whether ``module`` has the attribute before its first run, from its class or its ``__init__``."""
        return hasattr(type(module), name) or name in _stored_by_constructors(type(module))


def stored_names(modules: Iterable[nn.Module]) -> StoredNames:
    """Return the names that forwards, and hooks, of ``modules`` store."""
    classes: dict[type, None] = {}
    functions: list[tuple[FunctionType, type | None]] = []
    for module in modules:
        classes[type(module)] = None
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            functions += _functions_with_owners(hook)
        if "forward" in vars(module):
            functions += _functions_with_owners(vars(module)["forward"])
    own = [found for found in functions if not _is_library(found[0])]
    if own:
        return _search(tuple(classes), tuple(own))
    known = tuple(sorted(classes, key=lambda cls: (cls.__module__, cls.__qualname__, id(cls))))
    return _of_classes(known, tuple(_methods_of(known)))


@functools.lru_cache(maxsize=32)
def _of_classes(classes: tuple[type, ...], methods: tuple[FunctionType, ...]) -> StoredNames:
    """The names that ``classes`` store while they have these ``methods``: code may replace some."""
    return _search(classes, ())


def _methods_of(classes: Iterable[type]) -> Iterator[FunctionType]:
    for base in dict.fromkeys(base for cls in classes for base in cls.__mro__):
        if base.__module__.partition(".")[0] not in _FOUNDATIONS:
            yield from (value for value in vars(base).values() if isinstance(value, FunctionType))


def _search(classes: tuple[type, ...], functions: tuple[tuple[FunctionType, type | None], ...]) -> StoredNames:
    search = _Search()
    for cls in classes:
        search.add_class(cls)
    for function, owner in functions:
        search.reach(function, owner)
    search.reach_name("forward")
    search.reach_name("__call__")
    search.run()
    on_self = {cls: frozenset(n for base in cls.__mro__ for n in search.on_self.get(base, ())) for cls in classes}
    return StoredNames({cls: names for cls, names in on_self.items() if names}, frozenset(search.on_others))


class _Search:
    """Search from one function to all functions whose names its code has."""

    def __init__(self) -> None:
        self.on_self: dict[type | None, set[str]] = {}
        self.on_others: set[str] = set()
        self._classes: set[type] = set()
        self._methods: dict[str, list[tuple[FunctionType, type]]] = {}
        self._names: set[str] = set()
        self._reached: set[tuple[FunctionType, type | None]] = set()
        self._pending: list[tuple[FunctionType, type | None]] = []

    def add_class(self, cls: type) -> None:
        """Add the methods of ``cls`` and its bases, except those of libraries."""
        for base in cls.__mro__:
            if base in self._classes or base.__module__.partition(".")[0] in _FOUNDATIONS:
                continue
            self._classes.add(base)
            for name, value in vars(base).items():
                if name in ("__init__", "__new__", "__init_subclass__"):
                    continue
                for function in _functions_in(value):
                    self._methods.setdefault(name, []).append((function, base))
                    if name in self._names:
                        self.reach(function, base)

    def reach_name(self, name: str) -> None:
        """Reach all methods of that name."""
        if name not in self._names:
            self._names.add(name)
            for function, cls in self._methods.get(name, ()):
                self.reach(function, cls)

    def reach(self, function: FunctionType, cls: type | None) -> None:
        """Reach a function; ``cls`` is the class that it is a method of."""
        if (function, cls) not in self._reached:
            self._reached.add((function, cls))
            self._pending.append((function, cls))

    def run(self) -> None:
        """Search until no new function is reached."""
        while self._pending:
            function, cls = self._pending.pop()
            for wrapped in _wrapped_by(function):
                self.reach(wrapped, cls)
            for code in _codes(function.__code__):
                self._note_stores(code, cls)
                for name in code.co_names:
                    self.reach_name(name)
                    self._reach_global(function.__globals__.get(name), code)

    def _reach_global(self, value: Any, code: CodeType) -> None:
        if isinstance(value, FunctionType):
            if not _is_library(value):
                self.reach(value, None)
        elif isinstance(value, type):
            if not _LIBRARIES.match(value.__module__) and not _is_standard(value.__module__):
                self.add_class(value)
        elif isinstance(value, ModuleType) and not _LIBRARIES.match(value.__name__):
            for name in code.co_names:
                member = vars(value).get(name)
                if isinstance(member, FunctionType) and not _is_library(member):
                    self.reach(member, None)

    def _note_stores(self, code: CodeType, cls: type | None) -> None:
        # Most code stores nothing, and dis is slow.
        opcodes = set(code.co_code[::2])
        if not _OPCODES.isdisjoint(opcodes):
            for name, is_self in _stores(code):
                if is_self and cls is not None:
                    self.on_self.setdefault(cls, set()).add(name)
                else:
                    self.on_others.add(name)
        by_string = _BY_STRING.intersection(code.co_names)
        if _STORE_ITEM in opcodes or "update" in code.co_names:
            by_string |= _DICTIONARIES.intersection(code.co_names)
        if by_string:
            is_self = cls is not None and by_string <= {_REGISTER, "setattr", "delattr"} and _all_on_self(code)
            names = self.on_self.setdefault(cls, set()) if is_self else self.on_others
            constants = [c for c in code.co_consts if isinstance(c, str) and c.isidentifier()]
            if code.co_filename.endswith(_ROPE_UTILS):
                # It puts the type of a layer before names, which its code has in full.
                constants = [c for c in constants if c != "_"]
            names.update(constants)
            # A name that is put together, or given from elsewhere, is known in parts only.
            if "setattr" in by_string and (_BUILD_STRING in opcodes or not constants):
                names.update(f"{_PART}{c}" for c in constants or [""])


def _stores(code: CodeType) -> Iterator[tuple[str, bool]]:
    """Give each attribute that ``code`` stores, and whether its object is the first argument."""
    first = code.co_varnames[0] if code.co_argcount else None
    before: dis.Instruction | None = None
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("STORE_ATTR", "DELETE_ATTR"):
            yield instruction.argval, before is not None and first is not None and _loads(before, first)
        if instruction.opname not in ("CACHE", "EXTENDED_ARG"):
            before = instruction


def _all_on_self(code: CodeType) -> bool:
    """Return whether ``code`` calls ``register_buffer``, ``setattr`` and ``delattr`` for its first argument alone."""
    skipped = ("CACHE", "EXTENDED_ARG", "PUSH_NULL")
    instructions = [i for i in dis.get_instructions(code) if i.opname not in skipped]
    triples = zip(instructions, instructions[1:], instructions[2:], strict=False)
    return all(
        _loads(before, code.co_varnames[0]) if load.argval == _REGISTER else _loads_first(after, code.co_varnames[0])
        for before, load, after in triples
        if load.opname.startswith("LOAD_") and load.argval in _BY_STRING
    )


def _loads(instruction: dis.Instruction, variable: str) -> bool:
    """Return whether ``instruction`` leaves ``variable`` on top of the stack."""
    # From Python 3.13 on one instruction loads, or stores and loads, two variables.
    loaded = instruction.argval[-1] if isinstance(instruction.argval, tuple) else instruction.argval
    return loaded == variable and ("LOAD_FAST" in instruction.opname or instruction.opname == "LOAD_DEREF")


def _loads_first(instruction: dis.Instruction, variable: str) -> bool:
    """Return whether the first value that ``instruction`` puts on the stack is ``variable``."""
    if isinstance(instruction.argval, tuple):
        return instruction.argval[0] == variable and instruction.opname == "LOAD_FAST_LOAD_FAST"
    return _loads(instruction, variable)


def _stored_by_constructors(cls: type) -> set[str]:
    constructors = (vars(base).get("__init__") for base in cls.__mro__)
    codes = (constructor.__code__ for constructor in constructors if isinstance(constructor, FunctionType))
    return {name for code in codes for name, is_self in _stores(code) if is_self}


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _functions_in(value: Any) -> list[FunctionType]:
    """The functions that a class attribute or a hook runs."""
    if isinstance(value, FunctionType):
        return [value]
    if isinstance(value, MethodType | classmethod | staticmethod):
        return _functions_in(value.__func__)
    if isinstance(value, property):
        return [f for accessor in (value.fget, value.fset, value.fdel) for f in _functions_in(accessor)]
    if isinstance(value, functools.partial):
        return [f for part in (value.func, *value.args) for f in _functions_in(part)]
    if isinstance(value, functools.cached_property):
        return _functions_in(value.func)
    call = vars(type(value)).get("__call__")
    return [call] if isinstance(call, FunctionType) else []


def _functions_with_owners(value: Any) -> list[tuple[FunctionType, type | None]]:
    """The functions of a hook or a replaced ``forward``, each with the class of the module that it is a method of."""
    if isinstance(value, functools.partial):
        return [found for part in (value.func, *value.args) for found in _functions_with_owners(part)]
    owner = type(value.__self__) if isinstance(value, MethodType) else None
    return [(function, owner) for function in _functions_in(value)]


def _wrapped_by(function: FunctionType) -> Iterator[FunctionType]:
    """The functions that a decorator's function has in its closure."""
    for cell in function.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:  # the cell is empty
            continue
        if isinstance(content, FunctionType | MethodType | functools.partial):
            yield from _functions_in(content)


def _is_library(function: Callable[..., Any]) -> bool:
    name = str(getattr(function, "__globals__", {}).get("__name__", ""))
    return bool(_LIBRARIES.match(name)) or _is_standard(name)


def _is_standard(name: str) -> bool:
    return name.partition(".")[0] in sys.stdlib_module_names

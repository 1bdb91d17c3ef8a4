"""Names of attributes that the forwards of modules store, read from their code.

The code of ``forward``, of hooks, and of every function whose name occurs in that code is searched. A name that is
stored on ``self`` belongs to modules of that class; one that is stored on another object may belong to any module.
"""

import ast
import functools
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from nxdpp.ground.torch_names import FORWARD_HOOKS, FORWARD_PRE_HOOKS
from nxdpp.tracing.code.names import names_in, parts_of, used_names, variables_of
from nxdpp.tracing.code.source import Function, first_argument, named, tree_of

# Their code stores no results on modules that a model reads.
_LIBRARIES = re.compile(r"(torch|numpy|nxdpp|einops|transformers(?!\.models\.))(\.|$)")
_FOUNDATIONS = ("torch", "builtins")
_REGISTER = "register_buffer"
_BY_STRING = frozenset({"setattr", "delattr", _REGISTER})
_DUNDERS = frozenset({"__setattr__", "__delattr__"})
_DICTIONARIES = frozenset({"__dict__", "vars"})
# Marks a text that is part of a name.
_PART = "*"


@dataclass(frozen=True)
class StoredNames:
    """Names that a run of modules may store: by class on ``self``, and on another object."""

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
        for hook in (*FORWARD_PRE_HOOKS.of(module).values(), *FORWARD_HOOKS.of(module).values()):
            functions += _functions_with_owners(hook)
        if "forward" in vars(module):
            functions += _functions_with_owners(vars(module)["forward"])
    own = [found for found in functions if not _is_library(found[0].__globals__.get("__name__"))]
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
        """Add the methods of ``cls`` and its bases, except for bases in libraries."""
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
            on_self, on_others = _stored_by(function.__code__)
            if on_self:
                names = self.on_others if cls is None else self.on_self.setdefault(cls, set())
                names |= on_self
            self.on_others |= on_others
            for name in used_names(function):
                self.reach_name(name)
                self._reach_global(function.__globals__.get(name), function)

    def _reach_global(self, value: Any, function: FunctionType) -> None:
        if isinstance(value, FunctionType):
            if not _is_library(value.__globals__.get("__name__")):
                self.reach(value, None)
        elif isinstance(value, type) and not _is_library(value.__module__):
            self.add_class(value)
        elif isinstance(value, ModuleType) and not _LIBRARIES.match(value.__name__):
            for name in used_names(function):
                member = vars(value).get(name)
                if isinstance(member, FunctionType):
                    self._reach_global(member, function)


@functools.lru_cache(1 << 14)
def _stored_by(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Names that one function stores on its first argument, and on other objects."""
    tree = tree_of(code)
    if tree is None:
        return frozenset(), names_in(code)
    stores = _Stores(tree)
    return frozenset(stores.on_self), frozenset(stores.on_others)


class _Stores(ast.NodeVisitor):
    """The names that a function and the functions inside store."""

    def __init__(self, tree: ast.AST) -> None:
        self.on_self: set[str] = set()
        self.on_others: set[str] = set()
        self._own: set[str | None] = set()
        self._called: set[ast.AST] = set()
        nodes = list(ast.walk(tree))
        self._texts = {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        self._texts = {text for text in self._texts if text.isidentifier()}
        self._joins = any(isinstance(node, ast.JoinedStr | ast.BinOp) for node in nodes)
        self.visit(tree)
        # Code may store an item of the dictionary of an object under any name that it has.
        if any(named(node) in _DICTIONARIES for node in nodes) and any(map(_stores_an_item, nodes)):
            self.on_others |= self._texts | {str(node.arg) for node in nodes if isinstance(node, ast.keyword)}

    def visit(self, node: ast.AST) -> None:
        """Note what ``node`` stores, and what the nodes inside do."""
        if isinstance(node, Function):
            before, self._own = self._own, self._own | {first_argument(node)}
            self.generic_visit(node)
            self._own = before
            return
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            self._on(node.value).add(node.attr)
        elif isinstance(node, ast.Call) and (called := named(node.func)) in _BY_STRING | _DUNDERS:
            self._called.add(node.func)
            self._note_call(node, str(called))
        elif named(node) in _BY_STRING | _DUNDERS and node not in self._called:
            # The function goes elsewhere, and gets its arguments there.
            self.on_others |= self._names(None)
        self.generic_visit(node)

    def _note_call(self, call: ast.Call, called: str) -> None:
        owner: ast.AST = call
        names = call.args[:2]
        if called == _REGISTER and isinstance(call.func, ast.Attribute):
            owner, names = call.func.value, call.args[:1]
        elif called not in _DUNDERS and call.args:
            owner, names = call.args[0], call.args[1:2]
        if any(isinstance(argument, ast.Starred) for argument in call.args):
            owner, names = call, call.args
        names = [*names, *(keyword.value for keyword in call.keywords if keyword.arg in (None, "name"))]
        self._on(owner).update(name for argument in names for name in self._names(argument))

    def _on(self, owner: ast.AST) -> set[str]:
        return self.on_self if isinstance(owner, ast.Name) and owner.id in self._own else self.on_others

    def _names(self, argument: ast.expr | None) -> set[str]:
        """The names that an argument may be: one that is put together, or given from elsewhere, is known in parts."""
        if isinstance(argument, ast.Constant):
            return {argument.value} if isinstance(argument.value, str) else set()
        if isinstance(argument, ast.JoinedStr):
            texts = {str(part.value) for part in argument.values if isinstance(part, ast.Constant)}
            return {f"{_PART}{text}" for text in texts or {""}}
        parts = {f"{_PART}{text}" for text in self._texts or {""}} if self._joins or not self._texts else set()
        return self._texts | parts


def _stores_an_item(node: ast.AST) -> bool:
    is_store = isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
    return is_store or (isinstance(node, ast.Attribute) and node.attr == "update")


def _stored_by_constructors(cls: type) -> set[str]:
    constructors = (vars(base).get("__init__") for base in cls.__mro__)
    return {n for f in constructors if isinstance(f, FunctionType) for n in _stored_by(f.__code__)[0]}


def _functions_in(value: Any) -> list[FunctionType]:
    """The functions that a class attribute or a hook runs."""
    if isinstance(value, FunctionType):
        return [value]
    if isinstance(value, MethodType):
        return _functions_in(value.__func__)
    if (parts := parts_of(value)) is not None:
        return [function for part in parts for function in _functions_in(part)]
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
    for _, cell in variables_of(function):
        with suppress(ValueError):  # the cell is empty
            if isinstance(cell.cell_contents, FunctionType | MethodType | functools.partial):
                yield from _functions_in(cell.cell_contents)


def _is_library(module: Any) -> bool:
    return bool(_LIBRARIES.match(str(module))) or str(module).partition(".")[0] in sys.stdlib_module_names

"""Names in the code of functions: attributes and globals that the code may reach.

All names of a code object are known without a source. The syntax tree tells the way in which code uses a name; without
one, code may use all of its names in each way.
"""

import ast
import functools
import re
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache, wraps
from types import CodeType, FunctionType, MethodType
from typing import Any

from nxdpp.tracing.code.source import code_of, first_argument, named, tree_of

_FRAMEWORKS = re.compile(r"(torch|transformers|numpy|nxdpp|builtins|einops|einx|_?pytest)(\.|$)")  # assert calls pytest
# A trace asks again and again for the same code.
_KEPT = 1 << 14


@lru_cache(_KEPT)
def is_framework(module: str | None) -> bool:
    """Return whether a Python module is of torch, transformers, NumPy, nxdpp, pytest or the standard library."""
    name = module or ""
    return bool(_FRAMEWORKS.match(name)) or name.partition(".")[0] in sys.stdlib_module_names


def _of_code(names: Callable[[CodeType], frozenset[str]]) -> Callable[[FunctionType | CodeType], frozenset[str]]:
    """``names`` of a code or of a function, kept."""
    kept = lru_cache(_KEPT)(names)
    return wraps(names)(lambda function: kept(code_of(function)))


@_of_code
def used_names(code: CodeType) -> frozenset[str]:
    """Names of globals and attributes in a function and the functions inside."""
    return frozenset(name for part in _codes(code) for name in part.co_names)


@_of_code
def names_in(code: CodeType) -> frozenset[str]:
    """Names of globals and attributes in a function and the functions inside, and its strings."""
    return frozenset({*used_names(code), *_texts(code)})


def _texts(code: CodeType) -> Iterator[str]:
    """The strings of code that may be names, also those that it puts together from constants."""
    return (text for part in _codes(code) for text in _strings_in(part.co_consts) if text.isidentifier())


def _strings_in(constants: tuple[Any, ...]) -> Iterator[str]:
    """The strings among constants; a pattern (``case Layer(gain=g)``) has its names in a tuple."""
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple):
            yield from _strings_in(constant)


@_of_code
def all_names(code: CodeType) -> frozenset[str]:
    """All names and strings in a function, also the names of variables."""
    names: set[str] = set()
    for part in _codes(code):
        names.update(part.co_names, part.co_freevars, part.co_cellvars, part.co_varnames)
        names.update(_strings_in(part.co_consts))
    return frozenset(names)


def names_on_others(function: FunctionType) -> frozenset[str]:
    """Names of attributes that ``function`` reads of objects other than ``self``, and its strings."""
    tree = tree_of(function.__code__)
    if tree is None:
        return names_in(function)
    owner = function.__qualname__.rpartition(".")[0]
    own: set[str | None] = {"self", first_argument(tree)} if owner and not owner.endswith("<locals>") else {"self"}
    # A static method has no object of its own.
    if any(named(decorator) == "staticmethod" for decorator in getattr(tree, "decorator_list", ())):
        own = set()
    return frozenset({*_attributes_of_others(tree, own), *_strings(tree), *_texts(function.__code__)})


def attributes_in(function: Any) -> frozenset[str]:
    """Names that the code of ``function`` reads as attributes."""
    tree = tree_of(function.__code__)
    return used_names(function) if tree is None else frozenset(_attributes_of_others(tree, set()))


def _attributes_of_others(tree: ast.AST, own: set[str | None]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.MatchClass):
            yield from node.kwd_attrs
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
            continue
        if not (isinstance(node.value, ast.Name) and node.value.id in own):
            yield node.attr


@_of_code
def loaded_names(code: CodeType) -> frozenset[str]:
    """Names of globals and attributes that a function loads, and the strings that it uses.

    A string with which code only stores an item (``items["name"] = value``) is left out.
    """
    tree = tree_of(code)
    if tree is None:
        return names_in(code)
    names = set(_strings(tree))
    local = {name for part in _codes(code) for name in part.co_varnames}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in local:
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.name)
    return frozenset(names)


def _strings(tree: ast.AST) -> Iterator[str]:
    stored = {
        node.slice for node in ast.walk(tree) if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
    }
    for node in ast.walk(tree):
        if node not in stored and isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (text for text in (node.value,) if text.isidentifier())


def parts_of(value: Any) -> tuple[Any, ...] | None:
    """The objects that make up a method, a partial function, a property or the like; ``None`` for others."""
    if isinstance(value, MethodType):
        return value.__self__, value.__func__
    if isinstance(value, functools.partial):
        return value.func, *value.args, *value.keywords.values()
    if isinstance(value, property):
        return tuple(filter(None, (value.fget, value.fset, value.fdel)))
    if isinstance(value, staticmethod | classmethod):
        return (value.__func__,)
    return (value.func,) if isinstance(value, functools.cached_property) else None


def variables_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The names of the variables of enclosing functions that ``function`` uses, with their cells."""
    return zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)

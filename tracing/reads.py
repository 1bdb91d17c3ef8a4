"""Reads of a name in the code of functions: a counter that code only writes decides about nothing."""

import ast
import inspect
import linecache
import textwrap
from collections.abc import Iterable, Iterator
from functools import cache
from types import CodeType, FunctionType

_ADDING = frozenset({"add", "append", "appendleft", "clear", "extend", "insert", "setdefault", "update"})
_UNKNOWN = "an unknown place"


def is_read(name: str, functions: Iterable[FunctionType]) -> bool:
    """Return whether one of ``functions`` reads the variable or attribute ``name``, other than to write it.

    ``x.n += 1``, ``x.n[k] = v`` and a lone ``x.n.append(v)`` write ``n``. Code without a source may read it.
    """
    for function in functions:
        code = function.__code__
        if name in _names(code) and any(kind == "read" for kind, _ in _uses(code, name)):
            return True
    return not any(name in _names(function.__code__) for function in functions)


def writing_line(name: str, functions: Iterable[FunctionType]) -> str:
    """The first line that writes ``name``, or else one that reads it, as ``file:line, in function: code``."""
    found: dict[str, str] = {}
    for function in functions:
        code = function.__code__
        for kind, line in _uses(code, name) if name in _names(code) else ():
            text = linecache.getline(code.co_filename, line).strip()
            found.setdefault(kind, f"{code.co_filename}:{line}, in {code.co_name}: {text}")
    return found.get("write") or found.get("read") or _UNKNOWN


@cache
def _names(code: CodeType) -> frozenset[str]:
    names = {*code.co_names, *code.co_freevars, *code.co_cellvars, *code.co_varnames}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
        elif isinstance(constant, str):
            names.add(constant)
    return frozenset(names)


def _uses(code: CodeType, name: str) -> Iterator[tuple[str, int]]:
    """The uses of ``name``: ``"read"`` or ``"write"``, with the line."""
    tree = source_tree(code)
    if tree is None:
        yield "read", code.co_firstlineno
        return
    written = set(_written(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            if node.value == name:
                yield "read", node.lineno
        elif named(node) == name and isinstance(node, ast.Name | ast.Attribute):
            is_write = node in written or not isinstance(node.ctx, ast.Load)
            yield "write" if is_write else "read", node.lineno


@cache
def source_tree(code: CodeType) -> ast.AST | None:
    """The syntax tree of ``code``, with the line numbers of its file; ``None`` without a source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        return None
    return ast.increment_lineno(tree, code.co_firstlineno - 1)


def _written(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that code loads only to change their content."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            yield node.value
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            function = node.value.func
            if isinstance(function, ast.Attribute) and function.attr in _ADDING:
                yield function.value


def named(node: ast.AST) -> str | None:
    """The name of a variable or an attribute."""
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else None

"""Syntax trees of functions, and the expression that a frame evaluates, found in the source by its position.

Python tells for each instruction the lines and columns that it comes from. The instructions themselves differ from
one version of Python to the next. Code without a source has no tree: callers then take the careful answer.
"""

import ast
import linecache
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from types import CodeType, FunctionType
from typing import Any

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
# Lines and columns as Python gives them: first line, last line, first column, end column.
_Span = tuple[int, int, int, int]
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_KEPT = 1 << 12


@lru_cache(_KEPT)
def path_at(code: CodeType, offset: int) -> tuple[ast.AST, ...]:
    """The nodes from the file down to the one that ``code`` evaluates at ``offset``; empty without a source."""
    position: Any = next(islice(code.co_positions(), offset // 2, None), (None,))
    tree = _file_tree(code.co_filename)
    if tree is None or None in position:
        return ()
    path = _path(tree, position)
    # A call of a method in a chain over several lines begins at the name of the method.
    return path if _span(path[-1])[1::2] == position[1::2] else ()


@lru_cache(_KEPT)
def tree_of(code: CodeType) -> ast.AST | None:
    """The syntax tree of a function, with the line numbers of its file; ``None`` without a source."""
    tree = _file_tree(code.co_filename)
    found = [] if tree is None else [node for node in _at_line(tree, code.co_firstlineno) if _is_of(node, code)]
    if len(found) > 1:
        # Several lambdas in one line: the body tells them apart.
        positions = set(code.co_positions())
        found = [node for node in found if isinstance(node, ast.Lambda) and _span(node.body) in positions]
    return found[0] if len(found) == 1 else None


def code_of(function: FunctionType | CodeType) -> CodeType:
    """The code of a function; a code itself."""
    return function if isinstance(function, CodeType) else function.__code__


def named(node: ast.AST) -> str | None:
    """The name of a variable or an attribute."""
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else None


def is_none(node: ast.AST) -> bool:
    """Return whether ``node`` is ``None`` itself."""
    return isinstance(node, ast.Constant) and node.value is None


def first_argument(node: ast.AST) -> str | None:
    """The name of the first argument of a function."""
    if not isinstance(node, Function):
        return None
    arguments = [*node.args.posonlyargs, *node.args.args]
    return arguments[0].arg if arguments else None


_trees: dict[str, tuple[list[str], ast.Module | None]] = {}


def _file_tree(file: str) -> ast.Module | None:
    lines = linecache.getlines(file)
    if file not in _trees or _trees[file][0] is not lines:
        try:
            tree = ast.parse("".join(lines)) if lines else None
        except (SyntaxError, ValueError):
            tree = None
        _trees[file] = lines, tree
    return _trees[file][1]


def _span(node: ast.AST) -> _Span:
    where: Any = node
    if isinstance(node, ast.Module):
        return 0, 1 << 30, 0, 0
    first = where
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.decorator_list:
        first = node.decorator_list[0]
    return first.lineno, where.end_lineno, first.col_offset, where.end_col_offset


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes in ``node`` that have a place in the source."""
    for child in ast.iter_child_nodes(node):
        if hasattr(child, "lineno"):
            yield child
        else:
            yield from _children(child)


def _path(tree: ast.AST, span: _Span) -> tuple[ast.AST, ...]:
    path = [tree]
    while True:
        inner = next((child for child in _children(path[-1]) if _contains(_span(child), span)), None)
        if inner is None:
            return tuple(path)
        path.append(inner)


def _contains(outer: _Span, inner: _Span) -> bool:
    return (outer[0], outer[2]) <= (inner[0], inner[2]) and (inner[1], inner[3]) <= (outer[1], outer[3])


def _at_line(tree: ast.AST, line: int) -> Iterator[ast.AST]:
    for child in _children(tree):
        first, last, *_ = _span(child)
        if first <= line <= last:
            yield child
            yield from _at_line(child, line)


def _is_of(node: ast.AST, code: CodeType) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name == code.co_name and _span(node)[0] == code.co_firstlineno
    if isinstance(node, ast.Lambda):
        return code.co_name == "<lambda>" and node.lineno == code.co_firstlineno
    return isinstance(node, _COMPREHENSIONS) and code.co_name.startswith("<") and node.lineno == code.co_firstlineno

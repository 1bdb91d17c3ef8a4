"""Comparisons with ``None`` that code makes of a value it is about to get, found in its source.

::

    hidden, mask = self.encoder(x)              stored under names
    if mask is not None: ...                    a test of such a name
    keep(self.find(hidden))                     the value goes elsewhere: code of the user may compare it there

Code without a source may compare each value.
"""

import ast
import inspect
from collections.abc import Callable
from functools import lru_cache
from types import CodeType
from typing import Any

from nxdpp.tracing.code.frames import Frame, module_of, running
from nxdpp.tracing.code.names import is_framework
from nxdpp.tracing.code.source import is_none, tree_of


def may_be_tested(frame: Frame | None, item: Any) -> bool:
    """Return whether the value that ``frame`` evaluates may be compared with ``None``.

    ``item`` is the number of the value where the code unpacks several. Code of the user may compare a value that it
    hands on.
    """
    if frame is None:
        return False
    path = running(frame)
    stored = _destinations(path, item) if path else None
    if stored is None:
        return True
    compared, loaded = _uses(frame.f_code)
    if stored and not stored & loaded:
        return False
    # Code of the user may compare what it hands on.
    return bool(stored & compared) or not is_framework(module_of(frame))


def _destinations(path: tuple[ast.AST, ...], item: Any) -> set[str] | None:
    """Names under which the value at the end of ``path`` is stored; ``None`` if it is tested at once."""
    *above, node = path
    if isinstance(node, ast.Tuple | ast.List) and isinstance(node.ctx, ast.Store):
        targets = node.elts
        if isinstance(item, int) and 0 <= item < len(targets):
            targets = [targets[item]]
        return _names_of(targets)
    parent = above.pop()
    stored: set[str] = set()
    while isinstance(parent, ast.NamedExpr):
        stored |= _names_of([parent.target])
        parent = above.pop()
    if isinstance(parent, ast.Match) or (isinstance(parent, ast.Compare) and _compares_none(parent)):
        return None
    if isinstance(parent, ast.Assign):
        return stored | _names_of(parent.targets)
    if isinstance(parent, ast.AnnAssign):
        return stored | _names_of([parent.target])
    return stored | ({""} if isinstance(parent, ast.Expr) else set())


def _names_of(targets: list[ast.expr]) -> set[str]:
    """The names of ``targets``; none if one is another place."""
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    return names if all(isinstance(target, ast.Name) for target in targets) else set()


def _compares_none(node: ast.Compare) -> bool:
    return any(map(is_none, (node.left, *node.comparators)))


@lru_cache(256)
def _uses(code: CodeType) -> tuple[set[str], set[str]]:
    """The variables that ``code`` compares with ``None``, and the ones that it reads."""
    tree = tree_of(code)
    nodes = [] if tree is None else list(ast.walk(tree))
    compares = [node for node in nodes if isinstance(node, ast.Compare) and _compares_none(node)]
    compared = {side.id for node in compares for side in (node.left, *node.comparators) if isinstance(side, ast.Name)}
    return compared, {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def sets_none(function: Callable[..., Any]) -> bool:
    """Return whether the code of ``function`` sets a variable to ``None``; ``True`` without a source."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is None or _sets_none(code)


@lru_cache(256)
def _sets_none(code: CodeType) -> bool:
    tree = tree_of(code)
    return tree is None or any(
        isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None and _may_be(node.value)
        for node in ast.walk(tree)
    )


def _may_be(value: ast.expr) -> bool:
    if isinstance(value, ast.IfExp):
        return _may_be(value.body) or _may_be(value.orelse)
    return any(map(_may_be, value.elts)) if isinstance(value, ast.Tuple) else is_none(value)

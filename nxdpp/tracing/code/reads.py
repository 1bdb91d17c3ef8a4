"""Reads of a name in the code of functions: a counter that code only writes decides about nothing.

For content that layers share, a read is one of content that the layer itself has not set first.

::

    self.context.scale = 2.0                  sets scale        self.store[self.number] = y       sets an item
    return y * self.context.scale             reads its own     return self.store[self.number]    reads its own
    return y * self.context.scale (only)      needs scale       self.store[self.number - 1]       needs an item

``x.n += 1`` is no read, and neither is an append. Code without a source reads nothing here.
"""

import ast
import linecache
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType

from nxdpp.tracing.code.names import all_names
from nxdpp.tracing.code.source import named, tree_of

_ADDING = frozenset({"add", "append", "appendleft", "clear", "extend", "insert", "setdefault", "update"})
_UNKNOWN = "an unknown place"


def is_read(name: str, functions: Iterable[FunctionType]) -> bool:
    """Return whether one of ``functions`` reads the variable or attribute ``name``, other than to write it.

    ``x.n += 1``, ``x.n[k] = v`` and a lone ``x.n.append(v)`` write ``n``. Code without a source may read it.
    """
    using = [function.__code__ for function in functions if name in all_names(function)]
    return not using or any(kind == "read" for code in using for kind, _ in _uses(code, name))


def writing_line(name: str, functions: Iterable[FunctionType]) -> str:
    """The first line that writes ``name``, or else one that reads it, as ``file:line, in function: code``."""
    found: dict[str, str] = {}
    for function in functions:
        code = function.__code__
        for kind, line in _uses(code, name) if name in all_names(function) else ():
            text = linecache.getline(code.co_filename, line).strip()
            found.setdefault(kind, f"{code.co_filename}:{line}, in {code.co_name}: {text}")
    return found.get("write") or found.get("read") or _UNKNOWN


def _uses(code: CodeType, name: str) -> Iterator[tuple[str, int]]:
    """The uses of ``name``: ``"read"`` or ``"write"``, with the line."""
    tree = tree_of(code)
    if tree is None:
        yield "read", code.co_firstlineno
        return
    written = set(_written(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            if node.value == name:
                yield "read", node.lineno
        elif isinstance(node, ast.MatchClass) and name in node.kwd_attrs:
            yield "read", node.lineno
        elif named(node) == name and isinstance(node, ast.Name | ast.Attribute):
            is_write = node in written or not isinstance(node.ctx, ast.Load)
            yield "write" if is_write else "read", node.lineno


def _written(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that code loads only to change their content."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            yield node.value
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            function = node.value.func
            if isinstance(function, ast.Attribute) and function.attr in _ADDING:
                yield function.value


# Methods that return nothing; the others are not reads as statements of their own.
_CHANGES = frozenset({"append", "appendleft", "clear", "extend", "insert", "update"})
_LOGGING = frozenset(
    {"print", "warn", "warning", "warn_once", "warning_once", "info", "info_once", "debug", "log", "error", "write"}
)
_WITH_A_KEY = frozenset({"get", "pop", "setdefault"})


@dataclass(frozen=True)
class Uses:
    """``needs``: the code reads content that it has not set before. ``sets``: each run of it sets the content."""

    needs: bool
    sets: bool


def uses_of_name(functions: Iterable[FunctionType], name: str, own_class: Callable[[str], bool], is_item: bool) -> Uses:
    """The uses of an item ``name``, or of an attribute or a global.

    ``own_class`` tells whether the object has the methods of the class of this qualified name: others read
    ``self.name`` of another object.
    """
    reads_first = reads = sets = False
    for function in functions:
        tree = tree_of(function.__code__)
        if tree is None:
            continue
        owner = function.__qualname__.rpartition(".")[0]
        ignored = None if own_class(owner) or not owner or owner.endswith("<locals>") else "self"
        lines = list(_lines_of_reads(tree, name, ignored, is_item))
        first_set = min(_lines_of_sets(tree, name, is_item), default=None)
        if first_set is None:
            reads = reads or bool(lines)
        else:
            sets, reads_first = True, reads_first or any(line <= first_set for line in lines)
    # A method may set the content for the functions that it calls.
    return Uses(reads_first or (reads and not sets), sets)


def uses_of_items(functions: Iterable[FunctionType], holder: str) -> Uses:
    """The uses of items of a list or dict that code knows as ``holder``, under keys that it computes."""
    trees = [tree for function in functions if (tree := tree_of(function.__code__)) is not None]
    stored = {key for tree in trees for key in _stored_keys(tree, holder)}
    return Uses(any(_reads_items(tree, holder, stored) for tree in trees), False)


def _lines_of_sets(tree: ast.AST, name: str, is_item: bool) -> Iterator[int]:
    """Lines of statements that each run of a function reaches, and that set ``name``."""
    for statement in tree.body if isinstance(tree, ast.FunctionDef) else ():
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if any(_is_place(target, name, is_item) for target in targets):
            yield statement.lineno


def _lines_of_reads(tree: ast.AST, name: str, ignored: str | None, is_item: bool) -> Iterator[int]:
    logs = {part for node in ast.walk(tree) if _only_logs(node, name) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if node in logs:
            continue
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _WITH_A_KEY:
            if is_item and node.args and _is_text(node.args[0], name):
                yield node.lineno
        elif isinstance(node, ast.Compare) and is_item and _is_text(node.left, name):
            yield node.lineno
        elif isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Load):
            of = node.value if isinstance(node, ast.Attribute) else None
            if _is_place(node, name, is_item) and not (isinstance(of, ast.Name) and of.id == ignored):
                yield node.lineno


def _only_logs(node: ast.AST, name: str) -> bool:
    """Return whether a statement does nothing but log, and set ``name``: ``if not W: print("..."); W = True``."""
    if not isinstance(node, ast.If):
        return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and named(node.value.func) in _LOGGING
    for statement in (*node.body, *node.orelse):
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.AugAssign):
            targets = [statement.target]
        sets = bool(targets) and all(any(_is_place(t, name, is_item) for is_item in (True, False)) for t in targets)
        if not sets and not isinstance(statement, ast.Pass | ast.Global) and not _only_logs(statement, name):
            return False
    return True


def _is_place(node: ast.AST, name: str, is_item: bool) -> bool:
    if not is_item:
        return named(node) == name
    return isinstance(node, ast.Subscript) and _is_text(node.slice, name)


def _is_text(node: ast.AST, text: str) -> bool:
    return isinstance(node, ast.Constant) and node.value == text


def _names_of(tree: ast.AST, holder: str) -> set[str]:
    """``holder`` and the variables that are it: ``store = self.store``."""
    names = {holder}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and named(node.value) == holder:
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return names


def _stored_keys(tree: ast.AST, holder: str) -> Iterator[str]:
    names = _names_of(tree, holder)
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and named(node.value) in names:
            yield ast.dump(node.slice)


def _reads_items(tree: ast.AST, holder: str, stored: set[str]) -> bool:
    """Return whether code reads an item that is not under one of the keys ``stored``."""
    names = _names_of(tree, holder)
    harmless: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript):
            # Items under constant keys have names of their own.
            if not isinstance(node.ctx, ast.Load) or _is_known(node.slice, stored):
                harmless.add(node.value)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            if isinstance(node.value.func, ast.Attribute):
                harmless.add(node.value.func.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len":
            harmless.update(node.args)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            has_known_key = node.func.attr in _WITH_A_KEY and node.args and _is_known(node.args[0], stored)
            if node.func.attr in _CHANGES or has_known_key:
                harmless.add(node.func.value)
        elif isinstance(node, ast.Compare) and _is_known(node.left, stored):
            harmless.update(node.comparators)
        elif isinstance(node, ast.Assign) and all(isinstance(target, ast.Name) for target in node.targets):
            harmless.add(node.value)
    loads = (node for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute))
    return any(named(node) in names and isinstance(node.ctx, ast.Load) and node not in harmless for node in loads)


def _is_known(key: ast.AST, stored: set[str]) -> bool:
    return ast.dump(key) in stored or (isinstance(key, ast.Constant) and isinstance(key.value, str))

"""Branches of running code that do nothing but raise, found in its source.

::

    if x.isnan().any():                          asks ── true ──▶ ValueError("nan")         a branch that only raises
        raise ValueError("nan")                    └──── false ─▶ the code continues

Each kind of statement that is not known here, and code without a source, ends the search: the branch then does more.
"""

import ast
import builtins
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from nxdpp.tracing.code.frames import Frame, asked_value, running, runs, variable
from nxdpp.tracing.code.source import Function

# Ways out of a branch. The others are the branches themselves: code that does more.
_RAISES, _CONTINUES = "raises", "continues"
_Ways = frozenset[str]
_KINDS_WITH_EFFECT = (ast.Yield, ast.YieldFrom, ast.Await)


@dataclass(frozen=True)
class Raises:
    """The exception of a branch: its class and, if it is constant, its text."""

    error: type[Exception]
    text: str


def branches_that_raise(frame: Frame) -> dict[bool, Raises]:
    """The exceptions of branches that only raise, by the truth that leads there of the value that ``frame`` asks now.

    A function that returns the truth, ``return bool(x)``, leaves the question to a caller that asks nothing else.
    """
    return _branches(frame, asked_value(frame))


def _branches(frame: Frame, path: Sequence[ast.AST]) -> dict[bool, Raises]:
    depth = next((i for i in reversed(range(len(path))) if isinstance(path[i], ast.stmt)), 0)
    top = path[depth] if path else None
    if isinstance(top, ast.Return) and not _is_caught(path[:depth]):
        is_handed_on = depth + 2 < len(path) and all(map(_is_bool, path[depth + 1 : -1]))
        return _branches_of_caller(frame) if is_handed_on else {}
    if not isinstance(top, ast.If | ast.Assert) or _is_caught(path[:depth]):
        return {}
    outside = _names_outside(path[:depth])
    branches: dict[bool, list[ast.stmt]] = (
        {True: top.body, False: top.orelse} if isinstance(top, ast.If) else {True: [], False: [top]}
    )
    ends = {truth: _ways(branch, outside) for truth, branch in branches.items()}
    if isinstance(top, ast.Assert):
        ends[False] = frozenset({_RAISES})
    known = {truth: end or frozenset({f"the branch of {truth}"}) for truth, end in ends.items()}
    doomed = [statement for truth, branch in branches.items() if ends[truth] == {_RAISES} for statement in branch]
    ways = _ways_of(path[depth:], known) or {}
    return {truth: _raised(doomed, frame) for truth, way in ways.items() if way == {_RAISES}}


def _branches_of_caller(frame: Frame) -> dict[bool, Raises]:
    """The branches of the caller of ``frame``, which returns a truth; none where C code or a chain is between."""
    outer = frame.f_back
    path = () if outer is None else running(outer)
    call = path[-1] if path else None
    if outer is None or not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        return {}
    is_direct = runs(frame, variable(outer, call.func.id))
    return _branches(outer, path) if is_direct and not any(isinstance(each, ast.BoolOp) for each in path) else {}


def _ways_of(path: Sequence[ast.AST], ways: dict[bool, _Ways]) -> dict[bool, _Ways] | None:
    """The ways out for each truth of the value at the end of ``path``; ``None`` where its truth is not the condition.

    ``path`` begins with the statement, and ``ways`` belong to its condition.
    """
    top, *conditions = path
    if not conditions or conditions[0] is not getattr(top, "test", None):
        return None
    for outer, inner in pairwise(conditions):
        if isinstance(outer, ast.UnaryOp) and isinstance(outer.op, ast.Not):
            ways = {truth: ways[not truth] for truth in ways}
        elif isinstance(outer, ast.BoolOp):
            decides = isinstance(outer.op, ast.Or)
            if inner is not outer.values[-1]:
                if _names_a_value(outer):
                    return None
                ways = {decides: ways[decides], not decides: ways[True] | ways[False]}
        elif not _is_bool(outer):
            return None
    asked = path[-1]
    # Each part of ``0 < x < 5`` is asked at the same place: only a false one always decides.
    is_part = isinstance(asked, ast.Compare) and len(asked.ops) > 1
    return None if is_part and ways[False] != {_RAISES} else ways


def _is_bool(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "bool"


def _ways(statements: Sequence[ast.stmt], outside: frozenset[str]) -> _Ways:
    """The ways out of ``statements``; nothing for statements that do more."""
    ways: _Ways = frozenset()
    for index, statement in enumerate(statements):
        if isinstance(statement, ast.Raise):
            return ways | {_RAISES} if statement.exc is not None and _is_quiet(statement) else frozenset()
        if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
            # A variable may be set only where the exception ends its life.
            rest = _ways(statements[index + 1 :], outside)
            return ways | rest if rest == {_RAISES} and _sets_locals(statement, outside) else frozenset()
        if isinstance(statement, ast.If):
            both = [_ways(branch, outside) for branch in (statement.body, statement.orelse)]
            if not all(both) or not _is_quiet(statement.test) or _names_a_value(statement.test):
                return frozenset()
            ways |= (both[0] | both[1]) - {_CONTINUES}
            if _CONTINUES not in both[0] | both[1]:
                return ways
        elif isinstance(statement, ast.Assert) and _is_quiet(statement) and not _names_a_value(statement):
            ways |= {_RAISES}
        elif not isinstance(statement, ast.Pass):
            return frozenset()
    return ways | {_CONTINUES}


def _sets_locals(statement: ast.Assign | ast.AnnAssign | ast.AugAssign, outside: frozenset[str]) -> bool:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    return all(isinstance(target, ast.Name) for target in targets) and not names & outside and _is_quiet(statement)


def _is_quiet(node: ast.AST) -> bool:
    """Return whether an expression computes a value and changes nothing that outlives the exception."""
    return not any(isinstance(part, _KINDS_WITH_EFFECT) for part in ast.walk(node))


def _names_a_value(node: ast.AST) -> bool:
    """Return whether an expression sets a variable, which the code may read where it continues."""
    return any(isinstance(part, ast.NamedExpr) for part in ast.walk(node))


def _is_caught(path: Sequence[ast.AST]) -> bool:
    """Return whether the innermost function of ``path`` may catch an exception, or act on it."""
    for node in reversed(path):
        if isinstance(node, Function):
            return False
        if isinstance(node, ast.Try | ast.TryStar):
            return True
    return False


def _names_outside(path: Sequence[ast.AST]) -> frozenset[str]:
    """Variables of other functions, or of the module, that the innermost function of ``path`` sets."""
    function = next((node for node in reversed(path) if isinstance(node, Function)), None)
    declared = [] if function is None else [n for n in ast.walk(function) if isinstance(n, ast.Global | ast.Nonlocal)]
    return frozenset(name for node in declared for name in node.names)


def _raised(statements: Sequence[ast.stmt], frame: Frame) -> Raises:
    for node in (part for statement in statements for part in ast.walk(statement)):
        if isinstance(node, ast.Assert):
            return Raises(AssertionError, _text([node.msg]))
        if isinstance(node, ast.Raise):
            call = node.exc if isinstance(node.exc, ast.Call) else None
            raised = call.func if call is not None else node.exc
            error = _exception(raised.id, frame) if isinstance(raised, ast.Name) else None
            if error is not None:
                return Raises(error, _text(call.args) if call is not None and not call.keywords else "")
    return Raises(RuntimeError, "")


def _text(arguments: Sequence[ast.expr | None]) -> str:
    only = arguments[0] if len(arguments) == 1 else None
    return only.value if isinstance(only, ast.Constant) and isinstance(only.value, str) else ""


def _exception(name: str, frame: Frame) -> type[Exception] | None:
    value = variable(frame, name) or getattr(builtins, name, None)
    return value if isinstance(value, type) and issubclass(value, Exception) else None

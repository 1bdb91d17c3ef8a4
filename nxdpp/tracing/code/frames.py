"""The frames of running code: who asks, from which module and line, and in which expression."""

import ast
import dis
import inspect
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

from nxdpp.tracing.code.names import names_in
from nxdpp.tracing.code.source import path_at

Frame = FrameType


def caller(above: int = 0) -> Frame:
    """The frame of the caller of the function that calls this, or one that is ``above`` it."""
    frame = inspect.currentframe()
    for _ in range(2 + above):
        frame = frame and frame.f_back
    assert frame is not None
    return frame


def module_of(frame: Frame) -> str:
    """The name of the Python module whose code ``frame`` runs."""
    return str(frame.f_globals.get("__name__"))


def file_of(frame: Frame) -> str:
    """The file of the code of ``frame``."""
    return frame.f_code.co_filename


def function_name(frame: Frame) -> str:
    """The name of the function of ``frame``."""
    return frame.f_code.co_name


def variable(frame: Frame, name: str) -> Any:
    """The value of a local variable of ``frame``, or of a global; ``None`` without one."""
    return frame.f_locals.get(name, frame.f_globals.get(name))


def outwards(frame: Frame | None) -> Iterator[Frame]:
    """Yield ``frame`` and the frames that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def runs(frame: Frame, function: Callable[..., Any]) -> bool:
    """Return whether ``frame`` runs ``function``."""
    return frame.f_code is getattr(function, "__code__", None)


def globals_of(frame: Frame) -> list[Any]:
    """The globals of the code of ``frame``."""
    return list(frame.f_globals.values())


def frames_of(trace: TracebackType | None) -> list[tuple[Frame, int]]:
    """The frames of a traceback, each with the place in its code."""
    frames = []
    while trace is not None:
        frames.append((trace.tb_frame, trace.tb_lasti))
        trace = trace.tb_next
    return frames


def place_of(frame: Frame) -> tuple[str, int, str]:
    """The file, line and function that ``frame`` runs."""
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name


def running(frame: Frame, offset: int | None = None) -> tuple[ast.AST, ...]:
    """The nodes from the file down to the expression that ``frame`` evaluates now; empty without a source."""
    return path_at(frame.f_code, frame.f_lasti if offset is None else offset)


def raises_now(frame: Frame, offset: int) -> bool:
    """Return whether a statement of the code of ``frame`` raises at ``offset``, and no call in it."""
    path = running(frame, offset)
    return bool(path) and isinstance(path[-1], ast.Raise | ast.Assert)


def asked_value(frame: Frame) -> tuple[ast.AST, ...]:
    """The nodes down to the expression whose truth ``frame`` asks now; empty where C code asks, or without a source."""
    offset, code = frame.f_lasti, frame.f_code.co_code
    if "JUMP" in dis.opname[code[offset]]:
        # Python 3.11 gives a jump the place of a statement, or of an earlier expression.
        offset -= 2
        while dis.opname[code[offset]] == "EXTENDED_ARG":
            offset -= 2
    path = running(frame, offset)
    node = path[-1] if path else None
    if runs_a_call(frame):
        return (*path, node.args[0]) if isinstance(node, ast.Call) and _calls(node, "bool") and node.args else ()
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return (*path, node.operand)
    if isinstance(node, ast.Assert) and not isinstance(node.test, ast.BoolOp):
        return (*path, node.test)
    return path


def runs_a_call(frame: Frame) -> bool:
    """Return whether ``frame`` calls C code now, or a class."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith(("CALL", "PRECALL"))


def calls_c_code(frame: Frame) -> bool:
    """Return whether ``frame`` calls another function than ``isinstance``."""
    if not runs_a_call(frame):
        return False
    path = running(frame)
    return not _calls(path[-1], "isinstance") if path else "isinstance" not in names_in(frame.f_code)


def calls_attribute(frame: Frame) -> bool:
    """Return whether ``frame`` reads an attribute that it calls at once, as a method."""
    path = running(frame)
    return len(path) > 1 and isinstance(path[-2], ast.Call) and path[-2].func is path[-1]


def unpacked_length(frame: Frame) -> int | None:
    """The number of targets among which ``frame`` divides a value now; ``None`` where it does something else."""
    path = running(frame)
    if not path or not isinstance(path[-1], ast.Tuple | ast.List) or not isinstance(path[-1].ctx, ast.Store):
        return None
    targets = path[-1].elts
    return None if any(isinstance(target, ast.Starred) for target in targets) else len(targets)


def _calls(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def generator_place(generator: Any) -> tuple[int, dict[str, Any]] | None:
    """The place and the variables of a generator; ``None`` for one that has ended."""
    frame = generator.gi_frame
    return None if frame is None else (frame.f_lasti, frame.f_locals)

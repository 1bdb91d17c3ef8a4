"""The error for a construct of a model that cannot be traced, and the place in the model's code."""

import linecache
import random
import re
import secrets
import sys
import traceback
from functools import cache
from types import FrameType, TracebackType

_MACHINERY = (
    "/torch/", "/nxdpp/tracing/", "/transformers/utils/", "/collections/", "<frozen ", "contextlib.py", "functools.py",
    "numpy/random/", random.__file__, secrets.__file__,
)  # fmt: skip
_UNKNOWN = "an unknown place"


class TracingError(RuntimeError):
    """A model cannot be traced; the message has the construct, the file, the line and the remedy.

    ``reached`` are the modules, parameters and buffers that the trace used before the error, in order. ``reads_dict``
    is ``True`` where an input of unknown kind is read like a dict.
    """

    reached: tuple[str, ...] = ()
    reads_dict: bool = False


class StaleValueError(RuntimeError):
    """Code uses a traced value of another trace."""


def source_line(trace: TracebackType | None) -> str:
    """The innermost line of model code in a traceback, as ``file:line, in function: code``."""
    frames = traceback.extract_tb(trace)
    own = [frame for frame in frames if not is_machinery(frame.filename)]
    if not own:
        return _UNKNOWN
    frame = own[-1]
    return f"{frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}"


def calling_line() -> str | None:
    """The innermost running line of model code, in the format of a node's ``stack_trace``.

    fx itself would read the code of every frame of the stack from its file, for each node.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_machinery(frame.f_code.co_filename):
        frame = frame.f_back
    return frame and f'File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}'


def model_line(stack: str | None) -> str:
    """The innermost line of model code in a node's stack, as ``file:line, in function: code``."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', stack or "")
    own = [frame for frame in frames if not is_machinery(frame[0])]
    if not own:
        return _UNKNOWN
    file, line, function = own[-1]
    return f"{file}:{line}, in {function}: {linecache.getline(file, int(line)).strip()}"


def line_of(frame: FrameType) -> str:
    """The current line of ``frame``, as ``file:line, in function: code``."""
    file, line = frame.f_code.co_filename, frame.f_lineno
    return f"{file}:{line}, in {frame.f_code.co_name}: {linecache.getline(file, line).strip()}"


@cache
def is_machinery(file: str) -> bool:
    """Return whether ``file`` holds code of torch, of this package or of Python, and none of a model."""
    return any(part in file for part in _MACHINERY)

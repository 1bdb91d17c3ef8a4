"""The error for a construct of a model that cannot be traced, and the place in the model's code."""

import linecache
import os
import random
import re
import secrets
import traceback
from functools import cache
from types import TracebackType

from nxdpp.tracing.code.frames import Frame, caller, file_of, outwards, place_of

TRACING = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
"""This package's folder."""

_MACHINERY = (
    "/torch/", TRACING, "/transformers/utils/", "/collections/", "<frozen ", "contextlib.py", "functools.py",
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
    frame = calling_frame(caller())
    return frame and stack_line(frame)


def stack_line(frame: Frame) -> str:
    """The current line of ``frame``, in the same format."""
    return 'File "{}", line {}, in {}'.format(*place_of(frame))


def calling_frame(frame: Frame) -> Frame | None:
    """The innermost frame of model code from ``frame`` outwards."""
    return next((outer for outer in outwards(frame) if not is_machinery(file_of(outer))), None)


def model_line(stack: str | None) -> str:
    """The innermost line of model code in a node's stack, as ``file:line, in function: code``."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', stack or "")
    own = [frame for frame in frames if not is_machinery(frame[0])]
    if not own:
        return _UNKNOWN
    file, line, function = own[-1]
    return f"{file}:{line}, in {function}: {linecache.getline(file, int(line)).strip()}"


@cache
def is_machinery(file: str) -> bool:
    """Return whether ``file`` holds code of torch, of this package or of Python, and none of a model."""
    return any(part in file for part in _MACHINERY)

"""The error that says which construct of a model cannot be traced, where it stands and what to do."""

import re
import traceback
from types import TracebackType

_MACHINERY = (
    "/torch/",
    "/nxdpp/tracing/",
    "/transformers/utils/",
    "/collections/",
    "<frozen ",
    "contextlib.py",
    "functools.py",
)
_UNKNOWN = "an unknown place"


class TracingError(RuntimeError):
    """A model could not be turned into a graph; the message names the construct, the file and the line."""


def source_line(trace: TracebackType | None) -> str:
    """The innermost line of model code in a traceback, as ``file:line, in function: code``."""
    frames = traceback.extract_tb(trace)
    own = [frame for frame in frames if not any(part in frame.filename for part in _MACHINERY)]
    if not own:
        return _UNKNOWN
    frame = own[-1]
    return f"{frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}"


def model_line(stack: str | None) -> str:
    """The innermost line of model code in a stack as fx records it for a node."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(.*)', stack or "")
    own = [frame for frame in frames if not any(part in frame[0] for part in _MACHINERY)]
    if not own:
        return _UNKNOWN
    file, line, function, code = own[-1]
    return f"{file}:{line}, in {function}: {code}"

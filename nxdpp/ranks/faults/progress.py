"""Progress of this rank: the time since its last move, and the Python code that it is in.

A rank moves when a call or an action begins or ends, when a node of its stage's graph ends, when a long call says so
(``board.moved``), and when its device has passed a wait for other ranks (``StreamWaits``). Time in a compiler is
progress too, up to a limit of its own: its stacks tell nothing. Dynamo counts its compilations, inductor's workers
among them. A device compiles in C++, and tells it by ``board.is_compiling``.
"""

import inspect
import linecache
import os
import re
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from nxdpp.ground.torch_names import COMPILATIONS, COMPILER
from nxdpp.ranks.faults.board import Board

_STACK_LINES = 40

_TORCH = str(Path(torch.__file__).parent)
_NXDPP = str(Path(__file__).parents[2])
_OWN = tuple(os.path.join(folder, "") for folder in (_TORCH, _NXDPP))
_STANDARD = sysconfig.get_paths()["stdlib"]
# torch's own calls that wait for other ranks, where the script makes them.
_DISTRIBUTED = os.path.join(_TORCH, "distributed", "")
_COLLECTIVES = tuple(_DISTRIBUTED + name for name in ("distributed_c10d.py", "_functional_collectives.py"))
# The text of a call of ``wait``.
_WAIT = re.compile(r"^[^()]*\.wait\(|\.wait\([^()]*\)$")
# They tell nothing of their state. All of their code compiles.
_COMPILERS = (
    os.path.join(_TORCH, "utils", "cpp_extension.py"),
    os.path.join(os.path.dirname(_TORCH), "triton", "compiler", ""),
)
# The file name that fx gives to the code of a graph.
_GRAPH = "<eval_with_key>"


@dataclass(frozen=True)
class CodePlace:
    """The Python code that a thread is in.

    ``where`` is the innermost function of the user or of the model's library, such as ``"`Mlp.forward`, mlp.py:17"``.
    ``compiles`` is ``True`` in a compiler. ``node`` is the place in the code of a stage's graph; -1 outside. ``stack``
    has a line for each frame, the innermost last.
    """

    where: str
    compiles: bool
    node: int
    stack: list[str]


class Progress:
    """Time since the last move of a rank.

    Args:
        board: of this process.
        longest: seconds that one sample counts at most. So time in which the whole process was stopped, or Python's
            lock was held, counts as one sample.
        compile_limit: seconds for which compiling is progress; 0 for no limit.

    Attributes:
        unmoved_seconds: time since the last move, as of the last sample.
        compiling_seconds: time for which this rank compiles, as of the last sample; 0 when it does not.
    """

    def __init__(self, board: Board, longest: float, compile_limit: float = 0.0) -> None:
        self.unmoved_seconds = 0.0
        self.compiling_seconds = 0.0
        self._board = board
        self._longest = longest
        self._compile_limit = compile_limit
        self._mark: tuple[int, ...] = (-1, -1, -1, 0)
        self._time = time.monotonic()

    def sample(self) -> None:
        """Look at the board and at the thread that trains."""
        place = current_place(self._board.thread)
        waits = self._board.stream_waits
        if waits is not None:
            waits.first()
        passed_waits = 0 if waits is None else waits.passed
        mark = (self._board.moves, self._board.action, -1 if place is None else place.node, passed_waits)
        now = time.monotonic()
        passed = min(now - self._time, self._longest)
        compiles = self._board.is_compiling() or _dynamo_compiles() or (place is not None and place.compiles)
        has_moved = mark != self._mark
        before = 0.0 if has_moved else self.compiling_seconds
        self.compiling_seconds = before + passed if compiles else 0.0
        if self._compile_limit and self.compiling_seconds >= self._compile_limit:
            self.unmoved_seconds = self.compiling_seconds
        else:
            self.unmoved_seconds = 0.0 if compiles or has_moved else self.unmoved_seconds + passed
        self._mark, self._time = mark, now


def _dynamo_compiles() -> bool:
    """Return whether dynamo converts a frame, or waits for the backend that it has called."""
    # Not imported: it takes a second, and a program may never compile. A callback would be lost by a reset of dynamo.
    is_imported = COMPILER.path.rpartition(".")[0] in sys.modules
    return is_imported and COMPILER.exists and bool(getattr(COMPILER.found, COMPILATIONS.name, 0))


def current_place(thread: int | None) -> CodePlace | None:
    """The Python code that ``thread`` is in; ``None`` when it has ended."""
    frame = None if thread is None else sys._current_frames().get(thread)
    return None if frame is None else _place(frame)


def _place(frame: FrameType) -> CodePlace:
    where, node, compiles = "", -1, False
    stack: list[str] = []
    at: FrameType | None = frame
    while at is not None:
        code, line = at.f_code, at.f_lineno or 0
        name = code.co_filename
        if name.startswith(_GRAPH):
            # The outermost graph is the stage's.
            node = at.f_lasti
        compiles = compiles or name.startswith(_COMPILERS)
        if not where and _is_of_the_model(name):
            where = f"`{code.co_qualname}`, {os.path.basename(name)}:{line}"
        if len(stack) < _STACK_LINES:
            stack.append(f"{name}:{line} in {code.co_qualname}")
        at = at.f_back
    stack.reverse()
    if not where:
        where = f"`{frame.f_code.co_qualname}`, {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    return CodePlace(where, compiles, node, stack)


def script_collective(thread: int | None) -> str:
    """``"a collective of the script: `main`, train.py:17"`` where ``thread`` is in one; else empty."""
    frame = None if thread is None else sys._current_frames().get(thread)
    if frame is None or not _is_in_collective(frame):
        return ""
    return f"a collective of the script: {_place(frame).where}"


def _is_in_collective(frame: FrameType) -> bool:
    """Return whether the innermost code of the script waits for other ranks."""
    if frame.f_code.co_filename.startswith(_DISTRIBUTED):
        return True
    at: FrameType | None = frame
    while at is not None and at.f_code.co_filename.startswith(_TORCH):
        if at.f_code.co_filename.startswith(_COLLECTIVES):
            return True
        at = at.f_back
    return at is frame and _calls_wait(frame)


def _calls_wait(frame: FrameType) -> bool:
    """Return whether ``frame`` calls a ``wait``. A ``Work`` of torch, or a store, has no frame of its own."""
    at = inspect.getframeinfo(frame, context=0).positions
    if at is None or at.lineno is None or at.col_offset is None:
        return False
    line = linecache.getline(frame.f_code.co_filename, at.lineno).encode()
    call = line[at.col_offset : at.end_col_offset if at.end_lineno == at.lineno else None]
    return _WAIT.search(call.decode(errors="replace")) is not None


def _is_of_the_model(name: str) -> bool:
    if name.startswith("<") or name.startswith(_OWN):
        return False
    return not name.startswith(_STANDARD + os.sep) or "site-packages" in name

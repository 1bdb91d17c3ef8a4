"""Board of this rank: the collective call that it is in, and the action of its step.

The main thread writes plain attributes, at the cost of an assignment for each action. Another thread reads them::

    with board.call("run_train", "step", "pipeline"):      board.position() ->
        ...                                                "run_train step 17"
        board.describe_action = describe
        board.action = 5                                   "run_train step 17, stage 2, forward of microbatch 5"
    board.position() -> "outside of nxdpp, after run_train step 17"

``board.moves`` and ``board.action`` tell whether this rank moves.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Literal, NamedTuple, Protocol, Self

from nxdpp.ranks.faults.connection_errors import causes_of

Scope = Literal["world", "pipeline"]
"""The ranks that make a call together."""

NO_ACTION = -1

WORK_BEFORE = "work of its program on the device, before"
"""Work that the program, and not nxdpp, has launched on a stream: a collective, or a long kernel."""

TRAINING_STEPS = ("run_train", "run_train_microbatches", "train_samples", "train_microbatches")


class Position(NamedTuple):
    """The place of a rank in its program.

    Attributes:
        call: the outermost collective call with its number, such as ``"run_train step 17"``; ``""`` outside of calls.
        scope: the ranks that make the call together; ``""`` outside of calls.
        number: calls of ``scope`` that the rank has begun, this one included; 0 outside of calls.
        action: what it does, such as ``"stage 2, forward of microbatch 5"``; may be empty.
        last: the last call that has ended; ``""`` before the first end.
        begun: number of calls that the rank has begun, all scopes.
        has_limit: ``True`` in a call that is a hang when it does not move.
    """

    call: str
    scope: str
    number: int
    action: str
    last: str
    begun: int
    has_limit: bool = False

    def __str__(self) -> str:
        if self.call:
            return f"{self.call}, {self.action}" if self.action else self.call
        if self.action:
            return self.action
        return f"outside of nxdpp, after {self.last}" if self.last else "outside of nxdpp, before its first call"


class StreamEvent(Protocol):
    """A place in a stream of the device."""

    def query(self) -> bool:
        """Return whether the device has reached it; any thread may ask."""


class StreamWaits:
    """The waits that the stream of the device has not passed, the first one first, while the host goes on.

    On NCCL, and on other backends of devices, ``work.wait()`` stops the stream. The host stops later, where it next
    reads a value of the device::

        host     0F0 launched ─ wait for 0B0's gradient ─ step ends ─ loss.item() ──────────── (in the program)
        stream        └─ forward ─ waits for rank 1 ·······································

    So an event behind each wait tells whether the stream has passed it. Until then the rank waits for others, wherever
    its host is: the hang watch never takes it for the cause.

    Args:
        record: returns an event at the end of the present work of the device.

    Attributes:
        passed: number of waits that the stream has passed.
    """

    def __init__(self, record: Callable[[], StreamEvent]) -> None:
        self.passed = 0
        self._record = record
        self._left: deque[tuple[StreamEvent, object]] = deque()
        self._lock = threading.Lock()

    def add(self, wait: object) -> None:
        """Note that the stream waits in ``wait``, as ``str`` gives it."""
        with self._lock:
            self._left.append((self._record(), wait))
            self._pass()

    def first(self) -> object:
        """Return the wait that the stream is in, or ``None``; any thread may ask."""
        with self._lock:
            self._pass()
            return self._left[0][1] if self._left else None

    def _pass(self) -> None:
        while self._left and self._left[0][0].query():
            self._left.popleft()
            self.passed += 1


_NOTHING_FAILED = 0, Position("", "", 0, "", "", 0)


class Board:
    """The call and action of this rank.

    Attributes:
        action: index of the action of the step that runs; ``NO_ACTION`` outside of its actions.
        describe_action: gives the text of an index.
        wait: the exchange with other ranks that this rank waits in, as ``str`` gives it; ``None`` outside (``waits``).
        moves: grows with each sign of progress other than a new action.
        begun: number of calls begun, by scope.
        thread: the thread that made the last call; by default the main thread.
        members: the ranks of a scope, as far as they are known.
        interrupted: the last call that ended by an exception such as ``SystemExit``; ``""`` after one that ended well.
        stream_waits: the waits of the device, where messages wait for a stream and not for the host; else ``None``.
            The program may have let the stream wait too: a call begins with a wait for what was launched before.
        is_compiling: tells whether this process compiles a graph for its device; another thread asks.
        pipelines: number of models that are wrapped. Ranks tell models of one architecture apart by it.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start anew, as all ranks do when they start a watch."""
        self.action = NO_ACTION
        self.describe_action: Callable[[int], str] = str
        self.wait: object = None
        self.stream_waits: StreamWaits | None = None
        self.moves = 0
        self.begun: dict[str, int] = {"world": 0, "pipeline": 0}
        self.thread = threading.main_thread().ident
        self.members: dict[str, frozenset[int]] = {}
        self.interrupted = ""
        self.pipelines = 0
        self.is_compiling: Callable[[], bool] = lambda: False
        self._outermost: Call | None = None
        self._outside = ""
        self._last = ""
        # The error that ended the last call, and the place. The object itself would keep tensors.
        self._failed = _NOTHING_FAILED
        self._named: dict[str, int] = {}

    def call(self, name: str, unit: str = "", scope: Scope = "world", has_limit: bool = False) -> "Call":
        """Return a context manager for the time in the collective call ``name``.

        With a ``unit`` calls of that name are numbered in their text: ``"run_train step 17"``. ``scope`` names the
        ranks that must make the call together. With ``has_limit`` a call that does not move for ``hang_timeout`` is a
        hang. A call within a call is a part of the outer one.
        """
        return Call(self, name, unit, scope, has_limit)

    @contextmanager
    def construction(self) -> Iterator[None]:
        """Time in which this rank constructs a model. It is no call: a rank may refuse a model, and continue."""
        before, self._outside = self._outside, "in the construction of a model"
        try:
            yield
        finally:
            self._outside = before

    def calls_of(self, name: str) -> int:
        """Number of calls of this name that have begun."""
        return self._named.get(name, 0)

    def training_steps(self) -> int:
        """Number of training steps that have begun, by whichever call."""
        return sum(map(self.calls_of, TRAINING_STEPS))

    def moved(self) -> None:
        """Note progress within a call, such as one tensor of many that was read."""
        self.moves += 1

    def end_actions(self) -> None:
        """Note that the actions of a step have ended."""
        self.action = NO_ACTION
        self.describe_action = str

    def position_of(self, error: BaseException) -> Position:
        """Return the place at which ``error`` was raised: in the last call, if that one ended by it."""
        number, position = self._failed
        return position if number in map(id, causes_of(error)) else self.position()

    def position(self) -> Position:
        """Return the present place; any thread may ask."""
        call, action, begun = self._outermost, self.action, sum(self.begun.values())
        if call is None:
            return Position("", "", 0, self._outside, self._last, begun)
        text = ""
        if action != NO_ACTION:
            try:
                text = self.describe_action(action)
            except Exception:
                # The main thread is just between two steps.
                text = ""
        return Position(call.text, call.scope, call.number, text, self._last, begun, call.has_limit)


class Call:
    """One collective call, as a context manager."""

    __slots__ = ("_board", "has_limit", "name", "number", "scope", "text", "unit")

    def __init__(self, board: Board, name: str, unit: str, scope: Scope, has_limit: bool) -> None:
        self._board = board
        self.name = name
        self.unit = unit
        self.scope = scope
        self.has_limit = has_limit
        self.number = 0
        self.text = name

    def __enter__(self) -> Self:
        board = self._board
        board.moves += 1
        # A second thread's call counts as a part of the first thread's.
        if board._outermost is not None:
            return self
        # A collective that raised outside of calls may have left it.
        board.wait = None
        self.number = board.begun[self.scope] = board.begun[self.scope] + 1
        named = board._named[self.name] = board._named.get(self.name, 0) + 1
        self.text = f"{self.name} {self.unit} {named}" if self.unit else self.name
        if board.stream_waits is not None:
            board.stream_waits.add(f"{WORK_BEFORE} {self.text}")
        board.thread = threading.get_ident()
        board._outermost = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        board = self._board
        board.moves += 1
        if board._outermost is not self:
            return
        board._failed = (id(error), board.position()) if isinstance(error, Exception) else _NOTHING_FAILED
        board._outermost = board.wait = None
        board._last = self.text
        board.interrupted = "" if error is None or isinstance(error, Exception) else self.text


board = Board()
"""The board of this process."""

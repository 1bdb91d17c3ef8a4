"""Progress counts moves and the time between samples, but no time in which the process was stopped."""

import re
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import fx, nn
from torch.distributed import distributed_c10d
from torch.utils.checkpoint import checkpoint

from nxdpp.ranks.faults import progress as progress_module
from nxdpp.ranks.faults.board import Board, StreamWaits
from nxdpp.ranks.faults.progress import Progress, current_place, script_collective


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_moves_of_each_kind_start_the_time_anew(clock: list[float]) -> None:
    board = Board()
    board.thread = None
    progress = Progress(board, longest=20.0)
    progress.sample()

    def act() -> None:
        board.action += 1

    def enter() -> None:
        board.call("run_train").__enter__()

    reached = [False]
    board.stream_waits = StreamWaits(lambda: SimpleNamespace(query=lambda: reached[0]))
    board.stream_waits.add("the average of the gradients")

    def pass_wait() -> None:
        reached[0] = True

    moves: list[Callable[[], None]] = [act, board.moved, enter, pass_wait]
    for move in moves:
        clock[0] += 10.0
        progress.sample()
        assert progress.unmoved_seconds == 10.0
        move()
        clock[0] += 10.0
        progress.sample()
        assert progress.unmoved_seconds == 0.0


class _Slow(nn.Module):
    def __init__(self, reached: threading.Event, leave: threading.Event) -> None:
        super().__init__()
        self.reached = reached
        self.leave = leave

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.reached.set()
        self.leave.wait(30)
        self.leave.clear()
        return x


class _LeafTracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def test_each_layer_of_a_stage_is_a_move_and_the_place_is_the_models() -> None:
    reached, leave = threading.Event(), threading.Event()
    model = nn.Sequential(_Slow(reached, leave), _Slow(reached, leave))
    stage = fx.GraphModule(model, _LeafTracer().trace(model))
    thread = threading.Thread(target=stage, args=(torch.ones(1),))
    thread.start()
    nodes = []
    for _ in range(2):
        assert reached.wait(30)
        time.sleep(0.05)
        place = current_place(thread.ident)
        assert place is not None
        assert place.where.startswith("`_Slow.forward`, test_progress.py:")
        assert "in _Slow.forward" in "".join(place.stack[-3:])
        assert not script_collective(thread.ident)
        nodes.append(place.node)
        reached.clear()
        leave.set()
    thread.join(30)
    assert nodes[1] > nodes[0] >= 0
    assert current_place(thread.ident) is None


def _collective_of_torch(reached: threading.Event) -> None:
    lock = threading.Lock()
    lock.acquire()
    reached.set()
    code = compile("lock.acquire(timeout=1)", str(distributed_c10d.__file__), "eval")
    eval(code, {"lock": lock})


def test_collective_of_the_script_is_told() -> None:
    reached = threading.Event()
    thread = threading.Thread(target=_collective_of_torch, args=(reached,))
    thread.start()
    assert reached.wait(30)
    time.sleep(0.2)
    found = script_collective(thread.ident)
    thread.join(30)
    assert re.fullmatch(r"a collective of the script: `_\w+`, test_progress.py:\d+", found)


def _wait_in_a_checkpoint(wait: Callable[[], None]) -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        wait()
        return x * 2

    checkpoint(layer, torch.ones(1, requires_grad=True), use_reentrant=False)


def _wait_in_a_backend(wait: Callable[[], None]) -> None:
    def backend(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        wait()
        return graph.forward

    torch.compile(lambda x: x * 2, backend=backend)(torch.ones(1))


@pytest.mark.parametrize(("run", "compiles"), [(_wait_in_a_checkpoint, False), (_wait_in_a_backend, True)])
def test_only_compiling_is_progress(
    clock: list[float], run: Callable[[Callable[[], None]], None], compiles: bool
) -> None:
    """A compilation is progress for its limit. Code below a frame of dynamo that compiles nothing is none."""
    # The import of dynamo takes seconds.
    torch._dynamo.reset()
    reached, leave = threading.Event(), threading.Event()

    def wait() -> None:
        reached.set()
        leave.wait(60)

    thread = threading.Thread(target=run, args=(wait,))
    thread.start()
    assert reached.wait(60)
    board = Board()
    board.thread = thread.ident
    progress = Progress(board, longest=20.0, compile_limit=30.0)
    progress.sample()
    unmoved = []
    for _ in range(3):
        clock[0] += 10.0
        progress.sample()
        unmoved.append(progress.unmoved_seconds)
    leave.set()
    thread.join(60)
    assert unmoved == ([0.0, 0.0, 30.0] if compiles else [10.0, 20.0, 30.0])


def test_time_in_which_the_process_was_stopped_counts_as_one_sample(clock: list[float]) -> None:
    board = Board()
    board.thread = None
    progress = Progress(board, longest=20.0)
    progress.sample()
    clock[0] += 3600.0
    progress.sample()
    assert progress.unmoved_seconds == 20.0

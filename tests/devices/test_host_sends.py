"""Sends through host memory: their order, their errors, their memory, and the end of a process whose send blocks."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nxdpp.devices.host_sends import HostBuffers, HostSends, unchanged
from tests.support.run_program import run_program

_BLOCKED = """
import threading
from nxdpp.devices.host_sends import HostSends
sends, begun = HostSends(print), threading.Event()
def blocked():
    begun.set()
    threading.Event().wait()
sends.start(blocked, print)
begun.wait()
"""


class _Work:
    def wait(self) -> None:
        """Return at once."""


def _send_into(sent: list[Any]) -> Callable[[torch.Tensor], _Work]:
    def send(message: torch.Tensor) -> _Work:
        sent.append(message)
        return _Work()

    return send


def _sends() -> tuple[HostSends, list[BaseException]]:
    reported: list[BaseException] = []
    return HostSends(reported.append), reported


def test_messages_are_sent_in_the_order_of_the_calls_and_no_call_waits_for_a_copy() -> None:
    sends, reported = _sends()
    sent: list[float] = []
    allowed = threading.Event()

    def slow() -> torch.Tensor:
        allowed.wait()
        return torch.tensor(0.0)

    def send(message: torch.Tensor) -> _Work:
        sent.append(message.item())
        return _Work()

    started = [sends.start(slow, send), sends.start(lambda: torch.tensor(1.0), send)]
    assert sent == []
    allowed.set()
    for each in started:
        each.wait()
    assert sent == [0.0, 1.0]
    assert not reported


@pytest.mark.parametrize("fails", ["copy", "send"])
def test_an_error_is_reported_at_once_and_raised_by_all_that_follows(fails: str) -> None:
    sends, reported = _sends()
    sent: list[Any] = []

    def fail(*_: object) -> Any:
        raise RuntimeError("out of memory")

    copied: Callable[[], torch.Tensor] = fail if fails == "copy" else lambda: torch.ones(1)
    first = sends.start(copied, fail if fails == "send" else _send_into(sent))
    with pytest.raises(RuntimeError, match="out of memory") as caught:
        first.wait()
    assert caught.value.__notes__ == ["in the thread that sends tensors of a device through host memory"]
    assert reported == [caught.value]
    with pytest.raises(RuntimeError, match="out of memory"):
        sends.start(lambda: torch.ones(1), _send_into(sent))
    with pytest.raises(RuntimeError, match="out of memory"):
        sends.raise_error()
    assert not sent


def test_a_process_ends_although_its_send_blocks(tmp_path: Path) -> None:
    (tmp_path / "blocked.py").write_text(_BLOCKED)
    ended = run_program("blocked.py", [], 1, timeout=60, folder=tmp_path)
    assert ended.codes == [0], ended.output


def test_a_tensor_that_changes_while_it_is_copied_is_refused() -> None:
    tensor = torch.ones(2, 3)
    assert unchanged(tensor, tensor.clone)().equal(tensor)
    copied = unchanged(tensor, tensor.clone)
    tensor.view(-1)[0].add_(1)
    with pytest.raises(RuntimeError, match=r"shape \[2, 3\] was changed in place while it was copied"):
        copied()
    with torch.inference_mode():
        made = torch.ones(2)
    assert unchanged(made, made.clone)().equal(made)


def test_buffers_are_used_again_after_they_are_given_back_alone() -> None:
    buffers = HostBuffers()
    shape: tuple[torch.Size, tuple[int, ...], torch.dtype] = (torch.Size([2, 3]), (3, 1), torch.float32)
    addresses = set()
    for _ in range(10):
        taken = [buffers.take(*shape) for _ in range(3)]
        assert len({each.data_ptr() for each in taken}) == 3
        addresses |= {each.data_ptr() for each in taken}
        other = buffers.take(torch.Size([3, 2]), (2, 1), torch.float32)
        assert other.shape == (3, 2)
        for each in (*taken, other):
            buffers.give_back(each)
    assert len(addresses) == 3

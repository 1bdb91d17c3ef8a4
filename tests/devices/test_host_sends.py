"""Sends through host memory: their order, their errors, their memory, and the end of a process whose send blocks."""

import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nxdpp.devices import host_sends
from nxdpp.devices.host_sends import HostBuffers, HostSends, unchanged

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


def test_no_message_follows_one_that_failed() -> None:
    sends, reported = _sends()
    sent: list[Any] = []
    allowed = threading.Event()

    def fail() -> torch.Tensor:
        allowed.wait()
        raise RuntimeError("out of memory")

    started = [sends.start(fail, _send_into(sent)), sends.start(lambda: torch.ones(1), _send_into(sent))]
    allowed.set()
    for each in started:
        with pytest.raises(RuntimeError, match="out of memory"):
            each.wait()
    assert not sent
    assert len(reported) == 1


def test_a_process_ends_although_its_send_blocks() -> None:
    ended = subprocess.run([sys.executable, "-c", _BLOCKED], timeout=120, capture_output=True, text=True)
    # The triton of torch's CUDA builds may tell at its end of objects that it leaks.
    others = [line for line in ended.stderr.splitlines() if "nanobind" not in line and not line.startswith(" - ")]
    assert (ended.returncode, others) == (0, []), ended.stderr


def test_the_thread_ends_with_its_sends() -> None:
    sends, _ = _sends()
    sends.start(lambda: torch.ones(1), lambda message: _Work()).wait()
    thread = sends._thread._thread
    assert thread is not None
    assert thread.is_alive()
    del sends
    gc.collect()
    thread.join(timeout=60)
    assert not thread.is_alive()


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


def test_memory_of_the_layouts_used_last_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_sends, "_MOST_LAYOUTS", 2)
    buffers = HostBuffers()
    made = {rows: buffers.take(torch.Size([rows]), (1,), torch.float32) for rows in (1, 2, 3)}
    for rows in (1, 2, 1, 3):
        buffers.give_back(made[rows] if rows != 1 else torch.empty(1))
    assert {size.numel() for size, *_ in buffers._free} == {1, 3}


def test_memory_of_an_evaluation_serves_a_training() -> None:
    with torch.inference_mode():
        assert not HostBuffers().take(torch.Size([2]), (1,), torch.float32).is_inference()


def test_buffers_are_in_host_memory_whatever_the_default_device_is() -> None:
    with torch.device("meta"):
        assert HostBuffers().take(torch.Size([2]), (1,), torch.float32).device.type == "cpu"

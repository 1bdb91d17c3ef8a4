"""Links of shared memory: messages, room, and the end of the other process."""

import gc
import mmap
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nxdpp.ranks import host_link
from nxdpp.ranks.host_link import HostLink, SharedBuffer

pytestmark = pytest.mark.one_python


def linked() -> tuple[HostLink, HostLink]:
    """Both ends of a link, in one process."""
    own, other = SharedBuffer(), SharedBuffer()
    own_reader, other_reader = os.dup(own.reader), os.dup(other.reader)
    own_map, other_map = mmap.mmap(own.memory, 0), mmap.mmap(other.memory, 0)
    return HostLink(1, own, other_map, other_reader), HostLink(0, other, own_map, own_reader)


@pytest.fixture
def ends() -> Iterator[tuple[HostLink, HostLink]]:
    made = linked()
    yield made
    for end in made:
        end.close()


Ends = tuple[HostLink, HostLink]


def received(end: HostLink, like: torch.Tensor, tag: int) -> torch.Tensor:
    tensor = torch.full_like(like, -1)
    assert end.receive(tensor, tag)
    return tensor


@pytest.mark.parametrize("numbers", [0, 1, 1023, 1025, 2**20, 2**22])
def test_received_numbers_equal_the_sent_ones_also_when_those_change_after_the_send(ends: Ends, numbers: int) -> None:
    for end, other in (ends, ends[::-1]):
        sent = torch.randn(numbers)
        before = sent.clone()
        assert end.send(sent, 5)
        sent.zero_()
        assert torch.equal(received(other, sent, 5), before)


def test_messages_are_matched_by_tags_and_those_of_a_tag_by_order(ends: Ends) -> None:
    messages = [(tag, torch.randn(random.Random(tag).randrange(3000))) for tag in [*range(100), *range(100)]]
    for tag, message in messages:
        assert ends[0].send(message, tag)
    for start in (0, 100):
        for tag, message in random.Random(0).sample(messages[start : start + 100], 100):
            assert torch.equal(received(ends[1], message, tag), message)


def test_slots_are_used_again_and_a_message_without_a_slot_is_told(ends: Ends) -> None:
    message = torch.ones(2**20)
    slots = 16
    for _ in range(3):
        for tag in range(slots + 2):
            assert ends[0].send(message * tag, tag) is (tag < slots)
        # The last ones first: they have come by other means.
        for tag in reversed(range(slots + 2)):
            tensor = torch.empty_like(message)
            assert ends[1].receive(tensor, tag) is (tag < slots)
            assert tag >= slots or torch.equal(tensor, message * tag)


def test_a_larger_message_takes_memory_in_slots_of_a_smaller_one(ends: Ends) -> None:
    for numbers in (1100, 2000, 1500):
        messages = [torch.randn(numbers) for _ in range(3)]
        for tag, message in enumerate(messages):
            assert ends[0].send(message, tag)
        for tag, message in enumerate(messages):
            assert torch.equal(received(ends[1], message, tag), message)


def test_lack_of_memory_and_a_message_above_the_limit_are_told(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_link, "_LARGEST_SLOT", 2**16)
    large = torch.ones(2**14 + 1)
    assert not ends[0].send(large, 0)
    assert not ends[1].receive(large, 0)

    def refuse(*_: int) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    small = torch.ones(3)
    assert not ends[0].send(small, 1)
    assert not ends[1].receive(small, 1)
    with pytest.raises(OSError, match="no space"):
        SharedBuffer()


def test_another_number_of_bytes_is_refused(ends: Ends) -> None:
    ends[0].send(torch.ones(3), 0)
    with pytest.raises(RuntimeError, match="rank 0 has sent a message of 12 bytes where 16 bytes were expected"):
        ends[1].receive(torch.ones(4), 0)


def test_messages_of_an_ended_peer_come_and_then_its_end_names_it(ends: Ends) -> None:
    ends[0].send(torch.ones(3), 0)
    ends[0].close()
    assert torch.equal(received(ends[1], torch.ones(3), 0), torch.ones(3))
    for attempt in (ends[1].receive, ends[1].send):
        with pytest.raises(RuntimeError, match="rank 0 has ended: Connection closed by peer"):
            attempt(torch.ones(3), 1)


def test_nothing_is_left_of_a_killed_process() -> None:
    own, other = SharedBuffer(), SharedBuffer()
    child = os.fork()
    if not child:
        os.close(other.writer)
        link = HostLink(1, own, mmap.mmap(other.memory, 0), other.reader)
        link.send(torch.ones(2**20), 3)
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(own.writer)
    own.writer = os.open("/dev/null", os.O_RDONLY)
    link = HostLink(0, other, mmap.mmap(own.memory, 0), own.reader)
    assert torch.equal(received(link, torch.ones(2**20), 3), torch.ones(2**20))
    with pytest.raises(RuntimeError, match="rank 0 has ended"):
        link.receive(torch.ones(1), 4)
    os.waitpid(child, 0)
    assert os.fstat(own.memory).st_nlink == 0, "it has a name"
    os.close(own.writer)
    os.close(own.memory)


def test_a_dropped_link_has_no_descriptors() -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    ends = linked()
    ends[0].send(torch.ones(3), 0)
    assert len(os.listdir("/proc/self/fd")) > before
    del ends
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    assert "memfd:nxdpp" not in Path("/proc/self/maps").read_text()


def test_messages_of_all_sizes_have_room(ends: Ends) -> None:
    for exponent in range(25):
        size = 2**exponent
        message = torch.zeros(size, dtype=torch.uint8)
        message[-1] = exponent
        assert ends[0].send(message, exponent)
        assert torch.equal(received(ends[1], message, exponent), message)

"""Links of shared memory: messages, room, and the end of the other process."""

import fcntl
import mmap
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nxdpp.ranks import host_link
from nxdpp.ranks.host_link import HostLink, SharedBuffer, slots_of


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


@pytest.mark.parametrize("numbers", [0, 1025, 2**22])
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
    slots = slots_of(message.nbytes)
    assert slots == 4
    assert max(slots_of(2**exponent) << exponent for exponent in range(12, 30)) == 2 * host_link.LARGEST_SLOT
    for _ in range(3):
        for tag in range(slots + 2):
            assert ends[0].send(message * tag, tag) is (tag < slots)
        # The last ones first: they have come by other means.
        for tag in reversed(range(slots + 2)):
            tensor = torch.empty_like(message)
            assert ends[1].receive(tensor, tag) is (tag < slots)
            assert tag >= slots or torch.equal(tensor, message * tag)


def with_small_pipes(monkeypatch: pytest.MonkeyPatch) -> tuple[Ends, int]:
    """A link whose pipes have room for the returned number of headers."""
    monkeypatch.setattr(host_link, "_PIPE_BYTES", 1)
    ends = linked()
    return ends, fcntl.fcntl(ends[0]._writer, fcntl.F_GETPIPE_SZ) // host_link._HEADER.size


def test_ranks_that_send_far_ahead_before_they_receive_do_not_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends, room = with_small_pipes(monkeypatch)
    count, orders = 5 * room, dict[int, list[int]]()

    def run(rank: int) -> None:
        message = torch.zeros(1, dtype=torch.int64)
        order = []
        for number in range(count):
            ends[rank].send(message.fill_(number), number)
        for number in range(count):
            # Without a slot only the header comes.
            order.append(int(message) if ends[rank].receive(message.fill_(-1), number) else number)
        orders[rank] = order

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert orders == {rank: list(range(count)) for rank in (0, 1)}


def test_a_closed_link_writes_into_no_later_file(ends: Ends, tmp_path: Path) -> None:
    ends[0].close()
    files = [(tmp_path / str(number)).open("wb", buffering=0) for number in range(4)]
    for message in (torch.ones(3), torch.ones(300_000)):
        with pytest.raises(OSError, match="Bad file descriptor"):
            ends[0].send(message, 0)
    for file in files:
        assert os.fstat(file.fileno()).st_size == 0
        file.close()


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


def test_lack_of_memory_and_a_message_above_the_limit_are_told(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_link, "LARGEST_SLOT", 2**16)
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

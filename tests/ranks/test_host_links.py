"""Start of the links of a pipeline, each rank in a thread; ``NXDPP_P2P``, and ranks that cannot share memory."""

import errno
import gc
import os
import resource
import secrets
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, though not in its __all__

from nxdpp.ranks import host_links
from nxdpp.ranks.host_link import HostLink, SharedBuffer

PIPELINES = [[0, 2, 4], [1, 3, 5]]


def start(pipelines: list[list[int]] = PIPELINES) -> list[dict[int, HostLink]]:
    """The links of all ranks, in the order of the ranks."""
    store = HashStore()
    ranks = sum(map(len, pipelines))
    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(lambda rank: host_links.host_links(pipelines, rank, store), range(ranks)))


@pytest.fixture(autouse=True)
def no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NXDPP_P2P", raising=False)


def test_each_pair_of_a_pipeline_has_a_link_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    names = count()
    monkeypatch.setattr(secrets, "token_hex", lambda _: f"of-{os.getpid()}-{next(names)}")
    # What earlier tests have left is closed by a collection.
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    links = start()
    for pipeline in PIPELINES:
        for place, rank in enumerate(pipeline):
            assert sorted(links[rank]) == [other for other in range(3) if other != place]
            for other, link in links[rank].items():
                link.send(torch.tensor([rank, pipeline[other]]), 7)
    for pipeline in PIPELINES:
        for rank in pipeline:
            for other, link in links[rank].items():
                message = torch.zeros(2, dtype=torch.int64)
                link.receive(message, 7)
                assert message.tolist() == [pipeline[other], rank]
    assert next(names) == 6
    assert f"nxdpp-of-{os.getpid()}" not in Path("/proc/net/unix").read_text()
    del links, link
    assert len(os.listdir("/proc/self/fd")) == before


def test_large_pipelines_link_neighbours() -> None:
    links = start([list(range(10))])
    assert [sorted(of_rank) for of_rank in links] == [sorted({(r - 1) % 10, (r + 1) % 10}) for r in range(10)]


def _denied(*_: Any) -> None:
    raise PermissionError(errno.EACCES, "denied")


@pytest.mark.parametrize("lack", ["", "no memfd", "ulimit -v", "no socket"])
def test_without_shared_memory_there_is_no_link_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], lack: str
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    if lack == "":
        monkeypatch.setenv("NXDPP_P2P", "gloo")
    elif lack == "no memfd":
        monkeypatch.delattr(os, "memfd_create")
    elif lack == "ulimit -v":
        monkeypatch.setattr(resource, "getrlimit", lambda _: (2**31, resource.RLIM_INFINITY))
    else:
        monkeypatch.setattr(socket, "socket", _denied)
    assert start([[0, 1]]) == [{}, {}]
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == (2 if lack else 0)
    assert all("over gloo, without shared memory" in line for line in lines)
    assert lack != "ulimit -v" or "it takes 288 MiB of addresses, and ulimit -v allows 2048 MiB in all" in lines[0]
    assert len(os.listdir("/proc/self/fd")) == before


def test_another_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NXDPP_P2P", "tcp")
    with pytest.raises(ValueError, match="NXDPP_P2P is 'tcp': set it to 'gloo' or 'shm'"):
        host_links.host_links([[0, 1]], 0, HashStore())


def test_another_process_that_connects_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    strangers = []
    offer = host_links._LinkStart._offer

    def after_strangers(start: Any, other: int, can_share: bool) -> Any:
        name = start._store.get(start._key(other)).decode()
        for hello in (b"", f"{name} 7".encode()):
            strangers.append(socket.socket(socket.AF_UNIX))
            strangers[-1].connect(f"\0{name}")
            strangers[-1].sendall(hello)
        return offer(start, other, can_share)

    monkeypatch.setattr(host_links._LinkStart, "_offer", after_strangers)
    assert [sorted(of_rank) for of_rank in start([[0, 1]])] == [[1], [0]]
    for stranger in strangers:
        stranger.close()


def _accept_and_end(start: Any, listener: socket.socket, name: str) -> None:
    if start._own == 0:
        # Only once the other rank has sent.
        start._store.get(start._key(0, 1))
        listener.accept()[0].close()


@pytest.mark.parametrize(
    ("rank", "phase", "end"),
    [(0, "_accept", _accept_and_end), (1, "_confirm", lambda *_: None)],
    ids=["lower", "higher"],
)
def test_a_rank_that_ends_meanwhile_is_named_and_nothing_stays_open(
    monkeypatch: pytest.MonkeyPatch, rank: int, phase: str, end: Callable[..., None]
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(host_links._LinkStart, phase, end)
    with pytest.raises(RuntimeError, match=f"^rank {rank} has ended: Connection closed by peer$"):
        start([[0, 1]])
    assert len(os.listdir("/proc/self/fd")) == before


def _no_memory_after(allowed: int) -> Callable[[SharedBuffer], None]:
    make, made = SharedBuffer.__init__, 0

    def making(self: SharedBuffer) -> None:
        nonlocal made
        made += 1
        self.memory = self.reader = self.writer = -1
        if made > allowed:
            raise OSError("no memory")
        make(self)

    return making


def test_where_either_side_cannot_both_have_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """The higher rank has no memory. Sides that disagree would wait for each other."""
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(SharedBuffer, "__init__", _no_memory_after(2))
    assert start([[0, 1]]) == [{}, {}]
    assert len(os.listdir("/proc/self/fd")) == before

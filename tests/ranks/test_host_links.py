"""Start of the links of a pipeline, each rank in a thread; ``NXDPP_P2P``, and ranks that cannot share memory."""

import os
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

pytestmark = pytest.mark.one_python

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


@pytest.mark.parametrize("choice", [None, "shm"])
def test_each_pair_of_a_pipeline_has_a_link_of_its_own(monkeypatch: pytest.MonkeyPatch, choice: str | None) -> None:
    if choice:
        monkeypatch.setenv("NXDPP_P2P", choice)
    names = count()
    monkeypatch.setattr(secrets, "token_hex", lambda _: f"of-{os.getpid()}-{next(names)}")
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


@pytest.mark.parametrize("choice", ["gloo", None])
def test_without_shared_memory_there_is_no_link_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], choice: str | None
) -> None:
    if choice:
        monkeypatch.setenv("NXDPP_P2P", choice)
    else:
        monkeypatch.delattr(os, "memfd_create")
    assert start([[0, 1]]) == [{}, {}]
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == (0 if choice else 2)
    assert all("over gloo, without shared memory" in line for line in lines)


def test_another_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NXDPP_P2P", "tcp")
    with pytest.raises(ValueError, match="NXDPP_P2P is 'tcp': set it to 'gloo' or 'shm'"):
        host_links.host_links([[0, 1]], 0, HashStore())


def _refused(*_: Any) -> None:
    raise ConnectionRefusedError


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


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (socket.socket, "connect", _refused),
        (SharedBuffer, "__init__", _no_memory_after(2)),
        (SharedBuffer, "__init__", _no_memory_after(3)),
        (host_links, "_mapped", None),
    ],
    ids=["another kernel", "no memory on the higher rank", "no memory on the lower rank", "no map"],
)
def test_where_either_side_cannot_both_have_no_link(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, value: Any
) -> None:
    mapped = host_links._mapped
    calls: list[int] = []

    def second_fails(memory: int) -> Any:
        calls.append(memory)
        found = mapped(memory)
        if len(calls) == 2:
            raise OSError("no map")
        return found

    # What the test replaces is shared by both threads.
    class Replaced(socket.socket):
        connect = _refused

    before = len(os.listdir("/proc/self/fd"))
    if owner is socket.socket:
        monkeypatch.setattr(socket, "socket", Replaced)
    else:
        monkeypatch.setattr(owner, name, value or second_fails)
    assert start([[0, 1]]) == [{}, {}]
    assert len(os.listdir("/proc/self/fd")) == before

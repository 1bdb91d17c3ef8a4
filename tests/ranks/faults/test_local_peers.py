"""The end of a process on this host is known at once; a stopped one is told apart."""

import os
import signal
import subprocess
import sys
import time

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, though not in its __all__

from nxdpp.ranks.faults import local_peers
from nxdpp.ranks.faults.local_peers import LAUNCHER, LocalPeers
from nxdpp.ranks.faults.watch_store import WatchStore

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def _add(store: WatchStore, rank: int, process: int) -> None:
    started = local_peers._started(process) or 1
    store.add_process(local_peers._host(), {"rank": rank, "process": process, "started": started})


def test_a_process_that_ends_wakes_the_wait() -> None:
    store = WatchStore(HashStore())
    peers = LocalPeers(store, 0, 2)
    with subprocess.Popen(SLEEP) as peer:
        _add(store, 1, peer.pid)
        assert peers.find() == []
        assert peers.are_known
        assert peers.wait(0.05) == []
        assert not peers.has_ended(1)
        os.kill(peer.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while peers.stopped() != [1] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (peers.stopped(), peers.running()) == ([1], [])
        peers.kill_stopped([1], waits=False)
        assert peers.wait(10.0) == [1]
        assert peers.ended == [1]
        assert peers.wait_for_end(1, 10.0)
        assert peers.has_ended(1)


def test_the_launcher_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    with subprocess.Popen(SLEEP) as launcher:
        monkeypatch.setattr(os, "getppid", lambda: launcher.pid)
        peers = LocalPeers(WatchStore(HashStore()), 0, 1)
        launcher.kill()
        assert peers.wait(10.0) == [LAUNCHER]

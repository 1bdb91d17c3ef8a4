"""Two hosts on one machine: network namespaces, joined by a pair of virtual Ethernet devices.

::

    namespace a                        namespace b
    10.231.7.1 on eth_nxdpp ────────── 10.231.7.2 on eth_nxdpp
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch.distributed.run

from tests.support.run_ranks import fork_server

ADDRESSES = ("10.231.7.1", "10.231.7.2")
DEVICE = "eth_nxdpp"
_PORT = 29517
_CLONE_NEWNET = 0x40000000


@cache
def reason_against() -> str:
    """Return the reason for which this machine makes no network namespaces; empty if it makes them."""
    if not shutil.which("ip"):
        return "there is no ip command (iproute2)"
    try:
        with two_hosts():
            return ""
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip() or error.returncode}"


@contextmanager
def two_hosts() -> Iterator[list["Host"]]:
    """Make two namespaces, and remove them and what runs in them at the end.

    Raises ``CalledProcessError`` where that is not allowed.
    """
    names = [f"nxdpp-{os.getpid()}-{side}" for side in "ab"]
    ends = [f"nx{os.getpid()}{side}" for side in "ab"]
    hosts = [Host(name) for name in names]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            _ip("link", "set", end, "netns", name, "name", DEVICE)
            _ip("-n", name, "address", "add", f"{address}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                _ip("-n", name, "link", "set", device, "up")
        yield hosts
    finally:
        for host in hosts:
            host.end()
        for name in names:
            # The devices go with their namespaces.
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


class Host:
    """One namespace, and the processes that were started in it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._started: list[BaseProcess] = []

    def start(self, arguments: Sequence[str], output: Path) -> BaseProcess:
        """Start torchrun with ``arguments`` in the namespace. It is a fork of the server that has done the imports."""
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": DEVICE, "OMP_NUM_THREADS": "1"}
        process = fork_server().Process(target=_torchrun, args=(self.name, list(arguments), output, environment))
        process.start()
        self._started.append(process)
        return process

    def processes(self) -> list[int]:
        """Processes in the namespace."""
        listed = _ip("netns", "pids", self.name)
        return [int(process) for process in listed.split()]

    def end(self) -> None:
        """Kill all that runs in the namespace."""
        for process in self._started:
            process.kill()
            process.join()
        with suppress(subprocess.CalledProcessError):
            for number in self.processes():
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)


def agent(host: int, ranks: int, program: Sequence[str], *options: str) -> list[str]:
    """Arguments of torchrun on ``host`` (0 or 1) with ``ranks`` ranks, its forks; the hosts have a c10d rendezvous."""
    return [
        *("--nnodes", "2", "--nproc-per-node", str(ranks), "--run-path", "--start-method", "fork"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:{_PORT}", "--rdzv-id", "two-hosts"),
        # torchrun would look for the address among those of the machine's name.
        *("--local-addr", ADDRESSES[host], "--rdzv-conf", f"is_host={int(host == 0)}", *options, *program),
    ]


def _torchrun(namespace: str, arguments: list[str], output: Path, environment: Mapping[str, str]) -> None:
    """Be torchrun in ``namespace``, and write into ``output``."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, sys.stdout.fileno())
    os.dup2(descriptor, sys.stderr.fileno())
    os.environ.clear()
    os.environ.update(environment)
    with Path("/var/run/netns", namespace).open() as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}", file.name)
    torch.distributed.run.main(arguments)


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout

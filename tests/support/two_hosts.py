"""Two hosts on one machine: network namespaces, joined by a pair of virtual Ethernet devices.

::

    namespace a                        namespace b
    10.231.7.1 on eth_nxdpp ────────── 10.231.7.2 on eth_nxdpp
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import IO

ADDRESSES = ("10.231.7.1", "10.231.7.2")
DEVICE = "eth_nxdpp"
_PORT = 29517


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
        self._started: list[subprocess.Popen[str]] = []

    def start(self, command: Sequence[str], output: IO[str]) -> "subprocess.Popen[str]":
        """Start ``command`` in the namespace."""
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "GLOO_SOCKET_IFNAME": DEVICE,
            "OMP_NUM_THREADS": "1",
        }
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.name, *command], env=environment, stdout=output, stderr=output, text=True
        )
        self._started.append(process)
        return process

    def processes(self) -> list[int]:
        """Processes in the namespace: ``ip netns exec`` becomes the command itself."""
        listed = _ip("netns", "pids", self.name)
        return [int(process) for process in listed.split()]

    def end(self) -> None:
        """Kill all that runs in the namespace."""
        for process in self._started:
            process.kill()
            process.wait()
        with suppress(subprocess.CalledProcessError):
            for number in self.processes():
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)


def agent(host: int, ranks: int, program: Sequence[str], *options: str) -> list[str]:
    """The command of torchrun's agent of ``host`` (0 or 1) with ``ranks`` ranks; both hosts have a c10d rendezvous."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(ranks)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:{_PORT}", "--rdzv-id", "two-hosts"),
        # torchrun would look for the address among those of the machine's name.
        *("--local-addr", ADDRESSES[host], "--rdzv-conf", f"is_host={int(host == 0)}", *options, *program),
    ]


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout

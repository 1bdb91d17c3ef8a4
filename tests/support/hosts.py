"""Hosts on one machine: namespaces of networks, processes and names, joined by virtual Ethernet devices.

::

    namespace a                        namespace b                        further ones
    10.231.7.1 on eth_nxdpp ──┐        10.231.7.2 on eth_nxdpp ──┐
    process 1 (init)          │        process 1 (init)          │
    process 2 (torchrun)      └─ bridge in a namespace, a switch ┴──────── ...
"""

import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch.distributed.run

from tests.support.run_ranks import fork_server

ADDRESSES = ("10.231.7.1", "10.231.7.2", "10.231.7.3")
DEVICE = "eth_nxdpp"
_PORT = 29517
_AGENT = 2
_CLONE_NEWNET = 0x40000000
_CLONE_NEWPID = 0x20000000
_CLONE_NEWUTS = 0x04000000
_CLONE_NEWNS = 0x00020000
_MS_PRIVATE = (1 << 14) | (1 << 18)  # of all mounts below
_PR_SET_PDEATHSIG = 1


@cache
def reason_against() -> str:
    """Return the reason for which this machine makes no network namespaces; empty if it makes them."""
    if not shutil.which("ip"):
        return "there is no ip command (iproute2)"
    try:
        with hosts_on_one_machine(2):
            return ""
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip() or error.returncode}"


@contextmanager
def hosts_on_one_machine(number: int) -> Iterator[list["Host"]]:
    """Make ``number`` namespaces and a switch, and remove them and what runs in them at the end.

    Raises ``CalledProcessError`` where that is not allowed.
    """
    switch = f"nxdpp-{os.getpid()}"
    hosts = [Host(f"{switch}-{side}") for side in "abc"[:number]]
    names = [switch, *(host.name for host in hosts)]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for host, address in zip(hosts, ADDRESSES, strict=False):
            plug = f"plug{host.name[-1]}"
            _ip("-n", switch, "link", "add", plug, "type", "veth", "peer", "name", DEVICE, "netns", host.name)
            _ip("-n", switch, "link", "set", plug, "master", "bridge", "up")
            _ip("-n", host.name, "address", "add", f"{address}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                _ip("-n", host.name, "link", "set", device, "up")
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

    def processes(self) -> dict[int, int]:
        """Processes of the host: their numbers on this machine by their numbers there."""
        found = {}
        for process in _ip("netns", "pids", self.name).split():
            with suppress(OSError):
                status = Path(f"/proc/{process}/status").read_text()
                outer, *inner = re.findall(r"\d+", re.findall(r"NSpid:(.*)", status)[0])
                found.update({int(number): int(outer) for number in inner})
        return found

    def kill_agent(self) -> None:
        """Kill torchrun, and not its ranks."""
        os.kill(self.processes()[_AGENT], signal.SIGKILL)

    def lose(self) -> None:
        """Kill all processes at once."""
        os.kill(self.processes()[1], signal.SIGKILL)

    def end(self) -> None:
        """Kill all that runs in the namespace."""
        for process in self._started:
            process.kill()
            process.join()
        with suppress(subprocess.CalledProcessError):
            for number in _ip("netns", "pids", self.name).split():
                with suppress(ProcessLookupError):
                    os.kill(int(number), signal.SIGKILL)


def agent(host: int, hosts: int, ranks: int, program: Sequence[str], *options: str) -> list[str]:
    """Arguments of torchrun on ``host`` of ``hosts`` with ``ranks`` ranks, its forks; host 0 has the rendezvous."""
    return [
        *("--nnodes", str(hosts), "--nproc-per-node", str(ranks), "--run-path", "--start-method", "fork"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:{_PORT}", "--rdzv-id", "hosts"),
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
        _system("setns", file.fileno(), _CLONE_NEWNET)
    _system("unshare", _CLONE_NEWPID | _CLONE_NEWUTS)
    socket.sethostname(namespace)
    if init := os.fork():
        os._exit(os.waitstatus_to_exitcode(os.waitpid(init, 0)[1]) & 255)
    # The end of the process that the test knows is the end of the host.
    _system("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL)
    _system("unshare", _CLONE_NEWNS)
    _system("mount", None, b"/", None, _MS_PRIVATE, None)
    _system("mount", b"proc", b"/proc", b"proc", 0, None)
    if os.fork():
        os._exit(_outlast_children())
    torch.distributed.run.main(arguments)


def _outlast_children() -> int:
    """Be the init of a host, whose end would end all: wait for its processes, and return torchrun's exit code."""
    code = 0
    while True:
        try:
            process, status = os.wait()
        except ChildProcessError:
            return code
        if process == _AGENT:
            code = os.waitstatus_to_exitcode(status) & 255


def _system(call: str, *arguments: object) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), call)(*arguments):
        raise OSError(ctypes.get_errno(), f"{call}: {os.strerror(ctypes.get_errno())}")


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout

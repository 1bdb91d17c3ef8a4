"""Figures of this machine, measured once and kept in a file of the user's cache.

It is ``$XDG_CACHE_HOME/nxdpp/machine-HOST-KIND-RANKS.json``, in ``~/.cache`` without the variable. The file names the
machine, the torch and the nxdpp that it is for. Figures of others are never used: they are measured again.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from nxdpp.devices import CUDA, accelerator, cuda
from nxdpp.planning.machine import DeviceSpeed, Link
from nxdpp.ranks.launch import choose_device
from nxdpp.version import __version__

_KINDS = ("cpu", CUDA)
_TIMEOUT = 600
# Another number for other names or meanings of figures and factors.
_FORMAT = 3

# What another rank computes meanwhile: forward and backward of a layer.
_LAYER = """
import torch

torch.set_num_threads(1)
x, weight = torch.randn(256, 512, requires_grad=True), torch.randn(1376, 512, requires_grad=True)
back = torch.randn(512, 1376, requires_grad=True)
print("ready", flush=True)
while True:
    (torch.nn.functional.silu(x @ weight.t()) @ back.t() + x).softmax(-1).sum().backward()
"""


@dataclass
class KeptMachine:
    """Measured figures of this machine.

    Attributes:
        kind: of its devices, ``"cpu"`` or ``"cuda"``.
        about: the machine, the number of ranks, the torch and the nxdpp that the figures are for.
        figures: seconds and rates of a rank by name (``measured/rank.py``).
        layers: measured over counted seconds of the layers of models, of forward and backward, by a hash of what is
            measured.
        note: why figures that were kept are not used, or are not kept; empty otherwise.
    """

    kind: str
    about: dict[str, Any]
    figures: dict[str, float]
    layers: dict[str, list[list[float]]] = field(default_factory=dict)
    note: str = ""

    @property
    def device(self) -> DeviceSpeed:
        """Speed of a device."""
        own = self.figures
        peaks = {2: own["flops_2"], 4: own["flops_4"]}
        return DeviceSpeed(self.kind, peaks, 1.0, own["bandwidth"], own["operation"], own["action"])

    @property
    def link(self) -> Link | None:
        """Link between two devices of this machine; ``None`` for a single one."""
        own = self.figures
        if "all_reduce" not in own:
            return None
        messages = Link(own["message_rate"], own["message_latency"])
        return Link(own["all_reduce"], own["latency"], own["reduce_scatter"], own["all_gather"], messages)

    @property
    def cores(self) -> int | None:
        """Number of ranks that have cores of their own; ``None`` where each has a device."""
        own = int(self.about["cores"]) // int(self.about["threads"])
        return max(own, 1) if self.kind == "cpu" else None

    @property
    def clock(self) -> Callable[[], float]:
        """Clock of what a rank computes. A single thread has its own: other processes on its core do not count."""
        return time.thread_time if self.kind == "cpu" and self.about["threads"] == 1 else time.perf_counter

    def factors(self, what: Any, measure: Callable[[torch.device], list[list[float]]]) -> list[list[float]]:
        """Return the factors of the layers of ``what``, which ``measure`` measures on a device if they are not kept."""
        key = sha256(repr(what).encode()).hexdigest()[:16]
        if key not in self.layers:
            with self._as_a_rank():
                self.layers[key] = measure(choose_device(None, self.kind))
            self._write()
        return self.layers[key]

    @contextmanager
    def _as_a_rank(self) -> Iterator[None]:
        """Have the threads of a rank, and a neighbour for each other rank that has cores, inside."""
        if self.cores is None:
            yield
            return
        before = torch.get_num_threads()
        torch.set_num_threads(self.about["threads"])
        try:
            with _busy(min(self.cores, self.about["ranks"]) - 1):
                yield
        finally:
            torch.set_num_threads(before)

    def _write(self) -> None:
        file = place(self.kind, self.about["ranks"])
        written = file.with_suffix(f".{os.getpid()}")
        content = {"about": self.about, "figures": self.figures, "layers": self.layers}
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            written.write_text(json.dumps(content, indent=1))
            written.replace(file)
        except OSError as error:
            self.note = f"the figures of this machine are not kept ({error}): set XDG_CACHE_HOME to a folder for them."


@contextmanager
def _busy(processes: int) -> Iterator[None]:
    """Run ``processes`` other processes meanwhile, each with the forward and backward of a layer on one thread."""
    running = [subprocess.Popen([sys.executable, "-c", _LAYER], stdout=subprocess.PIPE) for _ in range(processes)]
    try:
        for each in running:
            assert each.stdout is not None
            each.stdout.readline()
        yield
    finally:
        for each in running:
            each.kill()
            each.communicate()


def place(kind: str, ranks: int) -> Path:
    """Return the file of this host's figures of ``ranks`` devices of ``kind``."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "nxdpp" / f"machine-{platform.node()}-{kind}-{ranks}.json"


def measured_machine(kind: str, most: int | None = None) -> KeptMachine:
    """Return the figures of this machine, kept or measured now; not collective. It takes about 20 s on a CPU.

    As many ranks measure as it has devices, on a CPU cores, or ``most``, but at least two of a CPU.

    Raises ``ValueError`` for a ``kind`` that this machine does not have, and ``RuntimeError`` where its ranks fail.
    """
    if kind not in _KINDS or (kind == CUDA and not cuda.find().count):
        raise ValueError(
            f"this machine has no {kind} device to measure: run it on a machine that has one, or measure its "
            f"processor (device='cpu', --device cpu)."
        )
    about, note = _about(kind, most), ""
    file = place(kind, about["ranks"])
    if os.path.lexists(file):
        try:
            kept = json.loads(file.read_text())
            differs = [name for name in about if kept["about"].get(name) != about[name]]
            if not differs:
                return KeptMachine(kind, **kept)
            reason = ", ".join(f"{name} {kept['about'].get(name)}, not {about[name]}" for name in differs)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
        note = f"{file} is not of this machine ({reason}): it was measured again."
    found = KeptMachine(kind, about, {}, note=note)
    found.figures = _measured(kind, about["ranks"], min(found.cores or about["ranks"], about["ranks"]))
    found._write()
    return found


def _about(kind: str, most: int | None) -> dict[str, Any]:
    """Return the machine, its number of ranks, ``most`` at most, and the versions of torch and nxdpp."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # The first number is of the outermost parallel region, which is torch's.
    threads = int((os.environ.get("OMP_NUM_THREADS") or "1").partition(",")[0])
    devices = cuda.find().count if kind == CUDA else cores
    ranks = devices if kind == CUDA else cores // threads
    return {
        "host": platform.node(),
        "processor": _processor(),
        "cores": cores,
        # As torchrun gives them to each rank.
        "threads": threads,
        "device": accelerator.name(CUDA) if kind == CUDA else "cpu",
        "devices": devices,
        # Two processes share a single core: a link of the CPU has two ends.
        "ranks": max(min(ranks, ranks if most is None else most), 1 if kind == CUDA else 2),
        "torch": torch.__version__,
        "nxdpp": __version__,
        "format": _FORMAT,
    }


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _measured(kind: str, ranks: int, at_once: int) -> dict[str, float]:
    """Return the mean figures of ``ranks`` ranks, of which ``at_once`` measure at a time."""
    with tempfile.TemporaryDirectory(prefix="nxdpp-") as folder:
        file = Path(folder) / "figures.json"
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        with subprocess.Popen(
            [*start, "-m", "nxdpp.planning.measured.rank", kind, str(at_once), str(file)],
            env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as started:
            try:
                _, errors = started.communicate(timeout=_TIMEOUT)
            except subprocess.TimeoutExpired as error:
                raise RuntimeError(f"the ranks that measure this machine take more than {_TIMEOUT} s.") from error
            finally:
                # torchrun ends its ranks when it is terminated, and leaves them when it is killed.
                started.terminate()
        if started.returncode:
            raise RuntimeError(f"the ranks that measure this machine have failed:\n{errors[-2000:]}")
        found: dict[str, float] = json.loads(file.read_text())
        return found

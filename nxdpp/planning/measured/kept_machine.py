"""Figures of this machine, measured once and kept in a file of the user's cache.

It is ``$XDG_CACHE_HOME/nxdpp/machine-HOST-KIND.json``, in ``~/.cache`` without the variable. The file names the machine
and the torch that it is for. Figures of others are never used: they are measured again.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from nxdpp.planning.machine import DeviceSpeed, Link
from nxdpp.planning.measured.load import busy
from nxdpp.ranks.launch import choose_device

_KINDS = ("cpu", "cuda")
_TIMEOUT = 600


@dataclass
class KeptMachine:
    """Measured figures of this machine.

    Attributes:
        kind: of its devices, ``"cpu"`` or ``"cuda"``.
        about: the machine and the torch that the figures are for.
        figures: seconds and rates of a rank by name (``measured/rank.py``).
        layers: measured over counted seconds of the layers of models, by a hash of what is measured.
        note: why figures that were kept are not used; empty otherwise.
    """

    kind: str
    about: dict[str, Any]
    figures: dict[str, float]
    layers: dict[str, list[float]] = field(default_factory=dict)
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
        return Link(self.figures["rate"], self.figures["latency"]) if "rate" in self.figures else None

    @property
    def cores(self) -> int | None:
        """Number of ranks that have cores of their own; ``None`` where each has a device."""
        own = int(self.about["cores"]) // int(self.about["threads"])
        return max(own, 1) if self.kind == "cpu" else None

    def factors(self, what: Any, measure: Callable[[torch.device], list[float]]) -> list[float]:
        """Return the factors of the layers of ``what``, which ``measure`` measures on a device if they are not kept."""
        key = sha256(repr(what).encode()).hexdigest()[:16]
        if key not in self.layers:
            with self._as_a_rank():
                self.layers[key] = measure(choose_device(None, self.kind))
            self._write()
        return self.layers[key]

    @contextmanager
    def _as_a_rank(self) -> Iterator[None]:
        """Have the threads of a rank, and neighbours on the other cores, inside."""
        if self.cores is None:
            yield
            return
        before = torch.get_num_threads()
        torch.set_num_threads(self.about["threads"])
        try:
            with busy(self.cores - 1):
                yield
        finally:
            torch.set_num_threads(before)

    def _write(self) -> None:
        file = place(self.kind)
        file.parent.mkdir(parents=True, exist_ok=True)
        written = file.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps({"about": self.about, "figures": self.figures, "layers": self.layers}, indent=1))
        written.replace(file)


def place(kind: str) -> Path:
    """Return the file of this host's figures of devices of ``kind``."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "nxdpp" / f"machine-{platform.node()}-{kind}.json"


def measured_machine(kind: str) -> KeptMachine:
    """Return the figures of this machine, kept or measured now; not collective. It takes about 20 s on a CPU.

    Raises ``ValueError`` for a ``kind`` that this machine does not have, and ``RuntimeError`` where its ranks fail.
    """
    if kind not in _KINDS or (kind == "cuda" and not torch.cuda.is_available()):
        raise ValueError(
            f"this machine has no {kind} device to measure: run it on a machine that has one, or measure its "
            f"processor (device='cpu', --device cpu)."
        )
    about, note = _about(kind), ""
    file = place(kind)
    if file.exists():
        try:
            kept = json.loads(file.read_text())
            differs = [name for name in about if kept["about"].get(name) != about[name]]
            if not differs:
                return KeptMachine(kind, **kept)
            reason = ", ".join(f"{name} {kept['about'].get(name)}, not {about[name]}" for name in differs)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
        note = f"{file} is not of this machine ({reason}): it was measured again."
    found = KeptMachine(kind, about, {}, note=note)
    found.figures = _measured(kind, about["ranks"], found.cores or about["ranks"])
    found._write()
    return found


def _about(kind: str) -> dict[str, Any]:
    """Return the machine and the version of torch."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = int(os.environ.get("OMP_NUM_THREADS") or 1)
    devices = torch.cuda.device_count() if kind == "cuda" else cores
    return {
        "host": platform.node(),
        "processor": _processor(),
        "cores": cores,
        # As torchrun gives them to each rank.
        "threads": threads,
        "device": torch.cuda.get_device_name() if kind == "cuda" else "cpu",
        "devices": devices,
        # Two processes share a single core: a link of the CPU has two ends.
        "ranks": devices if kind == "cuda" else max(cores // threads, 2),
        "torch": torch.__version__,
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
        ended = subprocess.run(
            [*start, "-m", "nxdpp.planning.measured.rank", kind, str(at_once), str(file)],
            env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            check=False,
        )
        if ended.returncode:
            raise RuntimeError(f"the ranks that measure this machine have failed:\n{ended.stderr[-2000:]}")
        found: dict[str, float] = json.loads(file.read_text())
        return found

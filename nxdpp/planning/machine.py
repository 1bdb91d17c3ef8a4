"""The machine and the job of a plan: devices, their speed, the links between them, and the samples of a step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from nxdpp.counted import check_whole, counted
from nxdpp.devices import CUDA
from nxdpp.devices.collective_bytes import Kind

if TYPE_CHECKING:
    import torch

# Bandwidths that the vendor prints are reached to this share by large operations.
_MEMORY_SHARE = 0.85


@dataclass(frozen=True)
class Link:
    """A link of a device, one way.

    Attributes:
        bytes_per_second: rate of one device.
        latency: seconds until the first byte arrives, and of each step of a collective.
        reduce_scatter, all_gather: their rates where they differ: gloo's reach a quarter and a half of its all-reduce.
        messages: the link of the messages of a pipeline, if it is another one: memory that two processes share.
    """

    bytes_per_second: float
    latency: float = 5e-6
    reduce_scatter: float | None = None
    all_gather: float | None = None
    messages: "Link | None" = None

    def __post_init__(self) -> None:
        if not 0 < self.bytes_per_second < float("inf") or not 0 <= self.latency < float("inf"):
            raise ValueError(f"{self}: the rate must be above 0, the latency at least 0, and both finite.")

    def rate(self, kind: Kind) -> float:
        """Return the bytes a second of collectives of ``kind``."""
        return {"reduce_scatter": self.reduce_scatter, "all_gather": self.all_gather}.get(kind) or self.bytes_per_second


@dataclass(frozen=True)
class DeviceSpeed:
    """Speed of one device.

    Attributes:
        kind: ``"cuda"``, ``"cpu"`` or ``"xla"``.
        peak_flops: FLOPs a second of dense matrix products, by bytes of a number (2 for bfloat16, 4 for float32).
        efficiency: share of the peak that large matrix products reach.
        memory_bandwidth: bytes a second that large operations read and write.
        operation_seconds: least seconds of an operation besides its work.
        action_seconds: seconds of the runtime for each action of a schedule.
    """

    kind: str
    peak_flops: Mapping[int, float]
    efficiency: float
    memory_bandwidth: float
    operation_seconds: float = 0.0
    action_seconds: float = 0.0

    def flops(self, dtype: "torch.dtype") -> float:
        """Return the FLOPs a second that large matrix products of ``dtype`` reach."""
        sizes = sorted(self.peak_flops)
        size = next((size for size in sizes if size >= dtype.itemsize), sizes[-1])
        return self.peak_flops[size] * self.efficiency

    def balance(self, dtype: "torch.dtype") -> float:
        """Return the FLOPs that it does while it moves one byte."""
        return self.flops(dtype) / self.memory_bandwidth

    def with_data_sheet(self, peak: float | None, bandwidth: float | None) -> "DeviceSpeed":
        """Return this with a vendor's ``peak``, of all dtypes, and ``bandwidth``; ``None`` leaves its own."""
        found = self if peak is None else replace(self, peak_flops={1: peak})
        return found if bandwidth is None else replace(found, memory_bandwidth=bandwidth * _MEMORY_SHARE)


# Peaks are from the vendor's data sheets, for dense products of 16 and 32 bits (TF32 off), SXM modules; a TPU has one
# peak, as XLA multiplies float32 in parts of 16 bits. The share that products of 8192 x 8192 reach, and the seconds of
# a kernel, are usual figures, not measured here.
DEVICES = {
    "a100": DeviceSpeed(CUDA, {2: 312e12, 4: 19.5e12}, 0.75, 2.04e12 * _MEMORY_SHARE, 3e-6, 100e-6),
    "h100": DeviceSpeed(CUDA, {2: 989e12, 4: 67e12}, 0.65, 3.35e12 * _MEMORY_SHARE, 3e-6, 100e-6),
    "h200": DeviceSpeed(CUDA, {2: 989e12, 4: 67e12}, 0.65, 4.8e12 * _MEMORY_SHARE, 3e-6, 100e-6),
    "b200": DeviceSpeed(CUDA, {2: 2250e12, 4: 75e12}, 0.65, 8e12 * _MEMORY_SHARE, 3e-6, 100e-6),
    "mi300x": DeviceSpeed(CUDA, {2: 1307e12, 4: 163e12}, 0.5, 5.3e12 * _MEMORY_SHARE, 5e-6, 100e-6),
    "tpu-v5p": DeviceSpeed("xla", {2: 459e12}, 0.75, 2.765e12 * _MEMORY_SHARE, 2e-6, 100e-6),
    # One core of a server. ``costs="measured"`` measures it.
    "cpu": DeviceSpeed("cpu", {4: 100e9}, 0.8, 10e9, 5e-6, 200e-6),
}


@dataclass(frozen=True)
class Machine:
    """Equal devices on equal hosts.

    Attributes:
        devices: number of devices, one rank each.
        memory: bytes of one device.
        device: their speed.
        hosts: number of hosts.
        link: between two devices of a host.
        host_link: between two devices of different hosts: the rate of one device.

    Raises ``ValueError`` for numbers below 1, and for devices that the hosts cannot share equally.
    """

    devices: int
    memory: int
    device: DeviceSpeed = field(default_factory=lambda: DEVICES["h100"])
    hosts: int = 1
    link: Link = field(default_factory=lambda: Link(400e9))
    host_link: Link = field(default_factory=lambda: Link(50e9, 20e-6))

    def __post_init__(self) -> None:
        for name in ("devices", "memory", "hosts"):
            check_whole(name, getattr(self, name))
        if self.devices % self.hosts:
            raise ValueError(
                f"{counted(self.devices, 'device does', 'devices do')} not divide over {counted(self.hosts, 'host')}: "
                "give hosts a divisor of the devices."
            )

    @property
    def devices_per_host(self) -> int:
        """Number of devices of a host."""
        return self.devices // self.hosts

    def link_of(self, ranks: int, stride: int) -> Link:
        """Return the slowest link that a group of ``ranks`` ranks needs, which are ``stride`` apart."""
        return self.link if ranks * stride <= self.devices_per_host or ranks == 1 else self.host_link

    def link_of_tokens(self, ranks: int, stride: int) -> Link:
        """Return a link that sends equal parts of a message to ``ranks`` ranks, ``stride`` apart, and to itself.

        What goes to ranks of the host and to other hosts takes different wires at the same time.
        """
        near = min(max(self.devices_per_host // stride, 1), ranks)
        parts = ((near - 1) / ranks, self.link), ((ranks - near) / ranks, self.host_link)
        seconds = max(part / link.bytes_per_second for part, link in parts)
        return Link(1 / seconds, self.link_of(ranks, stride).latency) if seconds else self.link


def find_device(name: str) -> DeviceSpeed:
    """Return the device ``name``; ``ValueError`` with all names for an unknown name."""
    if name not in DEVICES:
        raise ValueError(f"there is no device {name!r}. Choose one of {', '.join(DEVICES)}.")
    return DEVICES[name]


@dataclass(frozen=True)
class Job:
    """Samples of a step.

    Attributes:
        global_batch: number of samples of a step, all replicas together.
        inputs: a function of a number of samples ``B`` that returns the inputs of a microbatch with labels, by name.
            Tensors may be on the meta device; ``B`` is their first dimension.

    Raises ``ValueError`` for a batch below 1.
    """

    global_batch: int
    inputs: Callable[[int], Mapping[str, Any]]

    def __post_init__(self) -> None:
        check_whole("global_batch", self.global_batch)

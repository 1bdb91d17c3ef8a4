"""Accelerators of any type, by what torch has in common for all of them.

``torch.accelerator`` and the module of a type (``torch.cuda``, ``torch.xpu``, or the one that another package registers
for its type) give streams, events, random numbers and memory. Only this file asks for the module.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

import torch

from nxdpp.devices.device import Device, Stamp
from nxdpp.devices.strides import without_repetitions


class Accelerator(Device):
    """A device with streams. A stamp is an event in the current stream."""

    def stamp(self) -> Stamp:
        """Return an event that gets its time when the device reaches it."""
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def between(self, start: Stamp, end: Stamp) -> int:
        """Return the nanoseconds from one event to a later one; wait until the device has reached the later one."""
        end.synchronize()
        milliseconds: float = start.elapsed_time(end)
        return round(1e6 * milliseconds)

    def origin(self) -> tuple[Stamp, int]:
        """Return an event and its ``time.perf_counter_ns``; wait until the device is idle."""
        self.synchronize()
        stamp = self.stamp()
        stamp.synchronize()
        return stamp, time.perf_counter_ns()

    def enter_thread(self) -> Callable[[], None]:
        """Return a call that sets the present stream of the device."""
        return partial(torch.accelerator.set_stream, torch.accelerator.current_stream(self.device))

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        torch.accelerator.synchronize(self.device)

    def from_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start to copy by way of pinned memory: a copy from other memory waits for the work before it.

        Pinned memory of the caller is copied too, who may change it as soon as this returns.
        """
        if not tensor.is_cpu or not _has_pinned_memory(self.device.type):
            # Of another device of this process, or without such memory.
            return tensor.to(self.device)
        part = without_repetitions(tensor)
        pinned = torch.empty_like(part, pin_memory=True).copy_(part)
        copied = pinned.to(self.device, non_blocking=True)
        return copied if part is tensor else copied.expand(tensor.size()).contiguous()

    def to_host_together(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """Start to copy into pinned memory. The result waits for the work before the copies, not for the device."""
        if not _has_pinned_memory(self.device.type):
            return super().to_host_together(tensors)
        pinned = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors]
        for copy, tensor in zip(pinned, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        event = torch.Event(self.device)
        event.record()

        def copied() -> list[torch.Tensor]:
            event.synchronize()
            return pinned

        return copied

    def fill(self, tensor: torch.Tensor, host: torch.Tensor) -> None:
        """Give ``tensor`` the values of ``host`` by way of pinned memory."""
        tensor.copy_(self.from_host(host))

    def as_current(self) -> AbstractContextManager[Any]:
        """Make it the current device of a thread in the block."""
        return torch.accelerator.device_index(self.device.index)

    def random_state(self) -> bytes:
        """Return the state of the device's generator."""
        return _bytes(module_of(self.device.type).get_rng_state(*self._named()))

    def set_random_state(self, state: bytes) -> None:
        """Set the state of the device's generator."""
        values = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        module_of(self.device.type).set_rng_state(values, *self._named())

    def seeded_state(self, number: int) -> bytes:
        """Return the state of the device's generator after ``number`` has seeded it."""
        return _bytes(torch.Generator(self.device).manual_seed(number).get_state())

    def _named(self) -> tuple[torch.device, ...]:
        """The device as an argument of functions of its module; ``torch.mps`` has one device, and takes none."""
        return () if self.device.type == "mps" else (self.device,)


def module_of(kind: str) -> Any:
    """Return the module of a device type, such as ``torch.cuda``."""
    return torch.get_device_module(kind)


def present() -> str | None:
    """Return the type of this machine's accelerator, or ``None`` without one; makes no context on a device."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def count(kind: str) -> int:
    """Return the number of visible devices of a type, 0 where they cannot be used."""
    try:
        module = module_of(kind)
        return int(module.device_count()) if module.is_available() else 0
    # The type has no module, or its package does not load.
    except (RuntimeError, AttributeError):
        return 0


def start(device: torch.device) -> str | None:
    """Make ``device`` the current device, and return its identity, or ``None`` where its type tells none.

    Two ranks must not have the same. It is the place on the PCI bus: NCCL does not run on two parts (MIG) of one GPU.
    Raises ``RuntimeError`` if the device cannot be used.
    """
    torch.accelerator.set_device_index(device.index)
    torch.accelerator.synchronize(device)
    module = module_of(device.type)
    if not hasattr(module, "get_device_properties"):
        return None
    properties = module.get_device_properties(device)
    bus = [getattr(properties, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    identity = getattr(properties, "uuid", None) if None in bus else ":".join(f"{part:02x}" for part in bus)
    return None if identity is None else f"{properties.name} {identity}"


def current_index() -> int:
    """Return the index of the current device."""
    return torch.accelerator.current_device_index()


def name(kind: str) -> str:
    """Return the name of the first device of a type, such as ``"NVIDIA H100"``."""
    return str(module_of(kind).get_device_name(0))


def total_memory(device: torch.device) -> int:
    """Return the bytes of memory of a device."""
    return int(module_of(device.type).get_device_properties(device).total_memory)


def namespaces() -> dict[str, dict[str, Any]]:
    """Return the namespaces of ``torch.cuda`` and of the module of this machine's accelerator, by device type.

    They are there to replace functions in them.
    """
    found = torch.accelerator.current_accelerator()
    return {kind: vars(module_of(kind)) for kind in dict.fromkeys(("cuda", "cuda" if found is None else found.type))}


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


@cache
def _has_pinned_memory(kind: str) -> bool:
    try:
        torch.empty(1, pin_memory=True)
    # Torch has no accelerator, or its type has no such memory.
    except (RuntimeError, NotImplementedError):
        return False
    return True

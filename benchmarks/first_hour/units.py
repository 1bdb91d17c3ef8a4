"""Copies between host and device while the device is busy, and the device's random numbers."""

from collections.abc import Callable

import torch

from benchmarks.first_hour.place import CPU, Found, Place, Rank
from nxdpp.devices import accelerator
from nxdpp.devices.kinds import device_of
from nxdpp.devices.memory import peak_bytes

_BUSY_MILLISECONDS = 200
_MOST_PRODUCTS = 4096
_SQUARE, _SQUARE_DRY = 4096, 32


def cases(place: Place) -> list[str]:
    """Return the cases; the CPU has no work behind which a copy could be."""
    return [*_ANYWHERE, *(() if place.device == CPU else _WITH_STREAMS)]


def run(rank: Rank, case: str) -> Found:
    """Run a case on the first device."""
    kind = rank.place.device
    device = torch.device(CPU) if kind == CPU else torch.device(kind, 0)
    if kind != CPU:
        accelerator.start(device)
    return (_ANYWHERE | _WITH_STREAMS)[case](rank, device)


def _device(rank: Rank, device: torch.device) -> Found:
    """Tell what the device is."""
    figures: dict[str, object] = {"device": str(device), "visible": rank.place.visible, "backend": rank.place.backend}
    figures |= {"cuda": torch.version.cuda, "hip": torch.version.hip}
    if device.type != CPU:
        properties = accelerator.module_of(device.type).get_device_properties(device)
        figures |= {"name": accelerator.name(device.type), "properties": str(properties)}
    if rank.place.backend == "nccl":
        figures["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return Found(figures)


def _strides(rank: Rank, device: torch.device) -> Found:
    there = torch.arange(24.0, device=device).view(2, 3, 4).transpose(0, 1)
    here = device_of(device).to_host(there)()
    equal = here.stride() == there.stride() and torch.equal(here, there.cpu())
    return _told(equal, "to_host changes values or strides", strides=here.stride())


def _expanded(rank: Rank, device: torch.device) -> Found:
    host = torch.arange(4).expand(3, 4)
    return _told(torch.equal(device_of(device).from_host(host).cpu(), host), "from_host changes an expanded tensor")


def _freed(rank: Rank, device: torch.device) -> Found:
    """Free the memory of a tensor while its copy to the host is behind other work, and take the memory again."""
    values = _values(rank)
    there = values.to(device)
    busy = _Busy(rank, device)
    busy.start()
    late = there * 2
    copied = device_of(device).to_host(late)
    ahead = busy.is_running()
    del late
    taken = [torch.zeros_like(there) for _ in range(4)]
    equal = torch.equal(copied(), values * 2)
    return _told(equal and len(taken) == 4, "to_host reads memory that was given to another tensor", ran_ahead=ahead)


def _before_only(rank: Rank, device: torch.device) -> Found:
    """Wait for a copy to the host, and not for the work after it."""
    values = _values(rank)
    busy = _Busy(rank, device)
    copied = device_of(device).to_host(values.to(device))
    busy.start()
    equal = torch.equal(copied(), values)
    return _told(equal, "to_host changes values", ran_ahead=busy.is_running())


def _changed(rank: Rank, device: torch.device, pinned: bool = False) -> Found:
    """Change the source of a copy to the device as soon as the call returns."""
    if pinned and not _has_pinned_memory():
        return Found({"pinned": "the device has no pinned memory"})
    values = _values(rank)
    host = values.pin_memory() if pinned else values.clone()
    busy = _Busy(rank, device)
    busy.start()
    there = device_of(device).from_host(host)
    ahead = busy.is_running()
    host.zero_()
    taken = [torch.zeros(values.shape, pin_memory=_has_pinned_memory()) for _ in range(4)]
    equal = torch.equal(there.cpu(), values)
    return _told(equal and len(taken) == 4, "from_host reads its source after the call", ran_ahead=ahead)


def _random(rank: Rank, device: torch.device) -> Found:
    own = device_of(device)
    states = own.random_state(), torch.get_rng_state()
    first = torch.rand(8, device=device)
    own.set_random_state(states[0])
    torch.set_rng_state(states[1])
    again = torch.rand(8, device=device)
    seeded = own.seeded_state(7) == own.seeded_state(7)
    return _told(seeded and torch.equal(first, again), "the device's random state does not repeat its numbers")


def _memory(rank: Rank, device: torch.device) -> Found:
    kept = torch.ones(1 << 20, device=device)
    peak = peak_bytes(device)
    return _told(peak >= kept.nbytes, f"the peak of memory is {peak} bytes with {kept.nbytes} in use", peak_bytes=peak)


_ANYWHERE: dict[str, Callable[[Rank, torch.device], Found]] = {
    "the device": _device,
    "to_host keeps strides": _strides,
    "from_host of an expanded tensor": _expanded,
    "random state": _random,
    "peak of memory": _memory,
}
_WITH_STREAMS: dict[str, Callable[[Rank, torch.device], Found]] = {
    "to_host behind other work, its source freed": _freed,
    "to_host before other work": _before_only,
    "from_host behind other work, its source changed": _changed,
    "from_host of pinned memory": lambda rank, device: _changed(rank, device, pinned=True),
}


class _Busy:
    """Work of about 200 ms for the device."""

    def __init__(self, rank: Rank, device: torch.device) -> None:
        self._device = device
        self._square = torch.zeros(2 * (_SQUARE_DRY if rank.place.dry else _SQUARE,), device=device)
        self._products = 1 if rank.place.dry else self._measured()

    def start(self) -> None:
        for _ in range(self._products):
            torch.mm(self._square, self._square)
        self._end = torch.Event(self._device)
        self._end.record()

    def is_running(self) -> bool:
        """Return whether the device is still busy: a copy that has waited for it shows nothing."""
        return not self._end.query()

    def _measured(self) -> int:
        own = device_of(self._device)
        torch.mm(self._square, self._square)
        own.synchronize()
        begin = own.stamp()
        torch.mm(self._square, self._square)
        milliseconds = own.between(begin, own.stamp()) / 1e6
        return min(_MOST_PRODUCTS, 1 + int(_BUSY_MILLISECONDS / max(milliseconds, 1e-3)))


def _has_pinned_memory() -> bool:
    try:
        torch.empty(1, pin_memory=True)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _values(rank: Rank) -> torch.Tensor:
    return torch.randn(1 << (10 if rank.place.dry else 22))


def _told(passed: bool, problem: str, **figures: object) -> Found:
    return Found(figures, "" if passed else problem)

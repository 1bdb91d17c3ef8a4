"""``torch.fake``: the module that torch asks for the type's streams, memory and random numbers."""

import atexit
import faulthandler
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.utils import backend_registration

from tests.support.fake_device import build, process_group

_Device = torch.device | int | str | None


@cache
def native() -> ModuleType:
    """Return the library; build it where that has not been done."""
    return build.load()


@cache
def install() -> None:
    """Register the device type "fake" and its module ``torch.fake``, and the backend "fccl"."""
    # Shapes of operators whose meta kernels are Python's.
    import torch._meta_registrations

    if not faulthandler.is_enabled():
        faulthandler.enable()
    native()
    backend_registration.rename_privateuse1_backend("fake")
    torch._register_device_module("fake", _module())
    backend_registration.generate_methods_for_privateuse1_backend()
    process_group.register(native())
    atexit.register(native().stop)


@contextmanager
def host_waits() -> Iterator[dict[str, int]]:
    """Collect the waits of the host for the device in the block: the number of each line of code that waits."""
    before = dict(native().host_waits())
    found: dict[str, int] = {}
    yield found
    for place, count in native().host_waits().items():
        if count > before.get(place, 0):
            found[place] = count - before.get(place, 0)


def _module() -> ModuleType:
    module = ModuleType("torch.fake")
    for function in (
        current_device,
        current_stream,
        default_generator,
        device,
        device_count,
        empty_cache,
        get_device_name,
        get_device_properties,
        get_rng_state,
        get_rng_state_all,
        init,
        initial_seed,
        is_available,
        is_initialized,
        manual_seed,
        manual_seed_all,
        max_memory_allocated,
        max_memory_reserved,
        mem_get_info,
        memory_allocated,
        memory_reserved,
        reset_peak_memory_stats,
        seed,
        seed_all,
        set_device,
        set_rng_state,
        set_rng_state_all,
        set_stream,
        stream,
        synchronize,
    ):
        setattr(module, function.__name__, function)
    for name, value in {
        # torch.utils.checkpoint keeps the random state of modules that are.
        "_initialized": True,
        "_is_in_bad_fork": lambda: bool(native().is_in_bad_fork()),
        "get_amp_supported_dtype": _amp_dtypes,
        "is_bf16_supported": _has_bfloat16,
        "Stream": _Stream,
        "Event": _Event,
    }.items():
        setattr(module, name, value)
    sys.modules.setdefault("torch.fake", module)
    return module


def _has_bfloat16(including_emulation: bool = True) -> bool:
    return True


class _Stream:
    """Stands for ``torch.Stream`` of this type."""

    def __new__(cls, device: _Device = None, priority: int = 0, **_: Any) -> Any:
        return torch.Stream(torch.device("fake", _index(device)), priority=priority)


class _Event:
    """Stands for ``torch.Event`` of this type."""

    def __new__(cls, enable_timing: bool = False, **_: Any) -> Any:
        return torch.Event("fake", enable_timing=enable_timing)


def _index(device: _Device = None) -> int:
    if device is None:
        return int(native().current_device())
    if isinstance(device, int):
        return device if device >= 0 else int(native().current_device())
    index = torch.device(device).index
    return int(native().current_device()) if index is None else index


def _amp_dtypes() -> list[torch.dtype]:
    """Return the dtypes of autocast."""
    return [torch.float16, torch.bfloat16]


def is_available() -> bool:
    """Return ``True``: the device is part of the process."""
    return True


def is_initialized() -> bool:
    """Return ``True``."""
    return True


def init() -> None:
    """Do nothing."""


def device_count() -> int:
    """Return the number of devices."""
    return int(native().device_count())


def current_device() -> int:
    """Return the index of the current device."""
    return int(native().current_device())


def set_device(device: _Device) -> None:
    """Set the current device of this thread."""
    native().set_device(_index(device))


def get_device_name(device: _Device = None) -> str:
    """Return a name."""
    return f"fake accelerator {_index(device)}"


class _Properties(NamedTuple):
    name: str
    uuid: str
    total_memory: int


def get_device_properties(device: _Device = None) -> _Properties:
    """Return name, identity and size of a device; each process has devices of its own."""
    return _Properties(get_device_name(device), f"{os.getpid()}-{_index(device)}", mem_get_info(device)[1])


class device:
    """Context manager that sets the current device."""

    def __init__(self, device: _Device) -> None:
        self.idx = _index(device)
        self._before = -1

    def __enter__(self) -> None:
        self._before = current_device()
        set_device(self.idx)

    def __exit__(self, *_: object) -> None:
        set_device(self._before)


def synchronize(device: _Device = None) -> None:
    """Let the host wait until the device is idle."""
    native().synchronize(_index(device))


def current_stream(device: _Device = None) -> torch.Stream:
    """Return the current stream of this thread."""
    return torch.accelerator.current_stream(torch.device("fake", _index(device)))


def set_stream(stream: torch.Stream) -> None:
    """Set the current stream of this thread."""
    torch.accelerator.set_stream(stream)


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Set the current stream in a block; nothing for ``None``."""
    if stream is None:
        yield
        return
    with stream:
        yield


def memory_allocated(device: _Device = None) -> int:
    """Return the bytes of all tensors."""
    return int(native().memory_use(_index(device))[0])


def max_memory_allocated(device: _Device = None) -> int:
    """Return the most bytes of all tensors so far."""
    return int(native().memory_use(_index(device))[1])


def memory_reserved(device: _Device = None) -> int:
    """Return the bytes that the allocator holds."""
    return int(native().memory_use(_index(device))[2])


def max_memory_reserved(device: _Device = None) -> int:
    """Return the most bytes that the allocator has held."""
    return int(native().memory_use(_index(device))[3])


def reset_peak_memory_stats(device: _Device = None) -> None:
    """Let the peaks begin anew."""
    native().reset_peak(_index(device))


def mem_get_info(device: _Device = None) -> tuple[int, int]:
    """Return free and total bytes; the total is a number that fits the machines of the tests."""
    total = 8 * 2**30
    return total - memory_reserved(device), total


def empty_cache() -> None:
    """Give the memory of freed tensors back to the machine."""
    native().empty_cache()


@cache
def default_generator(index: int) -> torch.Generator:
    """Return the generator of a device."""
    return native().default_generator(index)  # type: ignore[no-any-return]


def get_rng_state(device: _Device = None) -> torch.Tensor:
    """Return the state of a device's generator."""
    return default_generator(_index(device)).get_state()


def set_rng_state(state: torch.Tensor, device: _Device = None) -> None:
    """Set the state of a device's generator."""
    default_generator(_index(device)).set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the states of all devices' generators."""
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    """Set the states of all devices' generators."""
    for index, state in enumerate(states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    """Seed the generator of the current device."""
    default_generator(current_device()).manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices."""
    for index in range(device_count()):
        default_generator(index).manual_seed(int(seed))


def seed() -> None:
    """Seed the generator of the current device with a random number."""
    default_generator(current_device()).seed()


def seed_all() -> None:
    """Seed the generators of all devices with random numbers."""
    for index in range(device_count()):
        default_generator(index).seed()


def initial_seed() -> int:
    """Return the seed of the current device's generator."""
    return default_generator(current_device()).initial_seed()

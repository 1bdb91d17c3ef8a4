"""Waits of the host for the device, counted by torch on CUDA and by the fake accelerator."""

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from benchmarks.first_hour.place import FAKE
from nxdpp.devices import CUDA


@contextmanager
def host_waits(device: str) -> Iterator[dict[str, int] | None]:
    """Collect the waits in the block: the number of each line that waits; ``None`` where nothing counts them."""
    if device == FAKE:
        from tests.support import fake_device

        with fake_device.host_waits() as found:
            yield found
    elif device == CUDA:
        counted: dict[str, int] = {}
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield counted
            finally:
                torch.cuda.set_sync_debug_mode("default")
        counted.update(Counter(f"{each.filename}:{each.lineno}" for each in seen if "synchroniz" in str(each.message)))
    else:
        yield None

"""Memory of a rank's device on this machine."""

import os

from nxdpp.devices import cuda


def device_memory() -> int:
    """Return the bytes of memory of a CUDA device; without one, each rank's equal part of the host's.

    The number of ranks of the host is ``LOCAL_WORLD_SIZE``, 1 without it.
    """
    if cuda.find().count:
        return cuda.total_memory(0)
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return host // int(os.environ.get("LOCAL_WORLD_SIZE") or 1)

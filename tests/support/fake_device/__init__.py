"""A device type of torch with the rules of CUDA and a process group with the rules of NCCL, which run on the CPU.

``install`` registers the type "fake" and the backend "fccl" for the rest of the process. ``csrc/fake.h`` has the parts.

- Memory of the device faults when the host touches it. Freed memory is filled with not-a-numbers, and given again.
- Kernels run late: when something waits for them, or when the host has launched nothing for 5 ms.
- Each launch is compared with what other streams do with the same memory: a missing wait or ``record_stream`` raises
  at the call, with both places.

Environment variables, read at the first use:

- ``FAKE_DEVICES``: devices of this process, 1 by default.
- ``FAKE_ONE_QUEUE=1``: all streams run in the order of their launches, as with ``CUDA_DEVICE_MAX_CONNECTIONS=1``.
- ``FAKE_LOG``: folder for one file a rank with the operations of its communicators, for ``deadlock.py``.
- ``FAKE_ABORT=0``: an operation that takes longer than the timeout of its group is an error of the next call, and does
  not end the process.
"""

from tests.support.fake_device.build import built, why_not
from tests.support.fake_device.device_module import host_waits, install, native

__all__ = ["built", "host_waits", "install", "native", "why_not"]

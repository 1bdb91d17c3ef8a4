"""States of a rank's random generators, of values that compare by ``==`` and go between ranks."""

import random
from typing import Any, cast

import numpy as np
import torch

from nxdpp.devices.kinds import device_of
from nxdpp.ranks import parallel_state

States = tuple[Any, ...]
"""States of Python's, NumPy's and torch's generators on the CPU, and of the device's."""


def random_states() -> States:
    """Return the states of this process; not collective."""
    name, keys, *others = cast(tuple[Any, ...], np.random.get_state())
    return random.getstate(), (name, keys.tobytes(), *others), torch.get_rng_state().numpy().tobytes()


def set_random_states(states: States) -> None:
    """Continue with the ``states`` that ``random_states`` returned; not collective."""
    of_python, (name, keys, *others), of_torch = states
    version, numbers, following = of_python
    random.setstate((version, tuple(numbers), following))
    np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), *others))
    torch.set_rng_state(torch.frombuffer(bytearray(of_torch), dtype=torch.uint8))


def all_random_states() -> States:
    """Return the states of this process, and the one of its device; not collective."""
    # torch loads no empty bytes with weights_only.
    return *random_states(), device_of(parallel_state.local_device()).random_state() or None


def set_all_random_states(states: States) -> None:
    """Continue with the ``states`` that ``all_random_states`` returned; not collective."""
    set_random_states(states[:-1])
    device_of(parallel_state.local_device()).set_random_state(states[-1] or b"")

"""States of a rank's random generators, of values that compare by ``==`` and go between ranks."""

import random
from typing import Any, cast

import numpy as np
import torch

States = tuple[Any, ...]
"""States of Python's, NumPy's and torch's generators on the CPU."""


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

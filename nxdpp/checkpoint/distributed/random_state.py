"""States of this rank's random generators: Python's, NumPy's, torch's on the CPU and the device, and the tracker's."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nxdpp.checkpoint.distributed.structured import decoded, encoded
from nxdpp.checkpoint.files.checksummed_reader import DamagedFile
from nxdpp.devices.kinds import device_of
from nxdpp.ranks import parallel_state
from nxdpp.tensor.random import get_xla_rng_tracker


def random_state(prefix: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the states as JSON, and its tensors under names that begin with ``prefix``."""
    tensors: dict[str, torch.Tensor] = {}
    states = {
        "python": _python_state(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": _device_state(),
        "tracker": get_xla_rng_tracker().get_states(),
    }
    return encoded(states, prefix, tensors), tensors


def check_random_state(saved: Any, folder: Path) -> None:
    """Raise ``DamagedFile`` for JSON of ``folder`` that ``random_state`` cannot have written."""
    own, _ = random_state("")
    is_right = isinstance(saved, dict) and saved.keys() == own.keys()
    if not is_right or not all(_has_form(saved[key], own[key]) for key in ("python", "numpy", "torch")):
        raise DamagedFile(f"the states of random generators in {folder} are not as a save writes them.")


def _has_form(saved: Any, own: Any) -> bool:
    """Return whether ``saved`` has the containers of ``own``; numbers may differ."""
    if isinstance(own, dict):
        return (
            isinstance(saved, dict) and saved.keys() == own.keys() and all(map(_has_form, saved.values(), own.values()))
        )
    if isinstance(own, list):
        return isinstance(saved, list) and len(saved) == len(own) and all(map(_has_form, saved, own))
    return isinstance(saved, str) == isinstance(own, str) and not isinstance(saved, dict | list)


def set_random_state(saved: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Continue with the states of ``random_state``."""
    states = decoded(saved, tensors)
    version, numbers, following = states["python"]
    random.setstate((version, tuple(numbers.tolist()), following))
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    get_xla_rng_tracker().set_states(states["tracker"])
    if parallel_state.model_parallel_is_initialized() and states["device"]:
        device_of(parallel_state.local_device()).set_random_state(states["device"])


def _python_state() -> tuple[int, torch.Tensor, float | None]:
    version, numbers, following = random.getstate()
    return version, torch.tensor(numbers, dtype=torch.int64, device="cpu"), following


def _device_state() -> bytes:
    if not parallel_state.model_parallel_is_initialized():
        return b""
    device = device_of(parallel_state.local_device())
    # This training then continues as one that loads the state: XLA has a different state for operations of a graph.
    device.submit()
    return device.random_state()

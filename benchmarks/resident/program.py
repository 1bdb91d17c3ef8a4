"""The beginning of a measured process: what ``import torch, transformers`` takes, before anything else.

Import it first. ``BASELINE`` is what is resident right after the two, and the peak counts from there.
"""

import json
import os
from pathlib import Path
from typing import Any

from tests.support.process_memory import peak_bytes, reset_peak, resident_bytes

import torch  # isort: skip
import transformers  # noqa: F401  # isort: skip

BASELINE = resident_bytes()
reset_peak()


def above_baseline() -> int:
    """Bytes resident now, above the baseline."""
    return resident_bytes() - BASELINE


def peak_above_baseline() -> int:
    """The most bytes that were resident since the two imports, above the baseline."""
    return peak_bytes() - BASELINE


def owned_bytes(model: torch.nn.Module) -> int:
    """Bytes of the memory of all parameters and buffers of ``model``, what they share once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (*model.parameters(), *model.buffers())
        if not tensor.is_meta
    }
    return sum(storages.values())


def report(folder: Path, **measured: Any) -> None:
    """Write what this process measured, for ``processes`` to read."""
    name = f"{os.environ.get('RANK', '0')}.json"
    (folder / name).write_text(json.dumps(measured))

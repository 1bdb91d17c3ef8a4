"""Writing a safetensors file tensor by tensor, so that no second copy of what goes into it is in memory.

The format is told in ``stored_tensor.py``. ``safetensors.torch.save_file`` wants all of a file's tensors at once.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from nxdpp.checkpoint.stored_tensor import DTYPES, memory_of

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8
_PIECE = 2**22


@dataclass(frozen=True)
class Layout:
    """Shape and dtype of a tensor that is to be written."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes that its values take."""
        return prod(self.shape) * self.dtype.itemsize


def write_shard(path: Path, layouts: Mapping[str, Layout], tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Write ``tensors``, which come in any order on any device and are those of ``layouts``, to the file ``path``.

    A file that is there is overwritten. The bytes are on the disk when this returns. Raises ``ValueError`` for a dtype
    that the format has not, and ``OSError``.
    """
    header, offsets = _header(layouts)
    left = set(layouts)
    with path.open("wb") as file:
        file.write(header)
        for name, tensor in tensors:
            assert Layout(tuple(tensor.shape), tensor.dtype) == layouts[name]
            left.remove(name)
            file.seek(len(header) + offsets[name])
            flat = tensor.detach().reshape(-1)
            for start in range(0, flat.numel(), _PIECE):
                file.write(memory_of(flat[start : start + _PIECE].cpu().contiguous()))
        assert not left
        file.truncate(len(header) + sum(layout.bytes for layout in layouts.values()))
        file.flush()
        os.fsync(file.fileno())


def _header(layouts: Mapping[str, Layout]) -> tuple[bytes, dict[str, int]]:
    """The bytes before the values, and where the values of each tensor start after them."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    # Widest first, so that all are aligned.
    for name, layout in sorted(layouts.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
        if layout.dtype not in _NAMES:
            raise ValueError(f"{name} is of {layout.dtype}, which a safetensors file cannot hold: convert it first.")
        offsets[name] = end
        end += layout.bytes
        entries[name] = {
            "dtype": _NAMES[layout.dtype],
            "shape": list(layout.shape),
            "data_offsets": [offsets[name], end],
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, offsets

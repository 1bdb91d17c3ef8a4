"""Safetensors files that are on the disk, with the usual permissions, when the writer returns."""

import os
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save, save_file

from nxdpp.devices.kinds import readable


def check_dtypes(dtypes: Iterable[tuple[str, torch.dtype]]) -> None:
    """Raise ``ValueError`` for the first of ``dtypes`` (tensor name, dtype) that safetensors does not support."""
    known: set[torch.dtype] = set()
    for name, dtype in dtypes:
        if dtype in known:
            continue
        try:
            save({name: torch.empty(0, dtype=dtype)})
        except KeyError as error:
            raise ValueError(
                f"{name} is of {dtype}, which a safetensors file cannot hold: convert it first."
            ) from error
        known.add(dtype)


def write_shard(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write ``tensors`` to ``path``, and replace an existing file.

    Tensors that are not contiguous, share memory, or are not on the CPU are copied. Raises ``OSError`` if the file
    cannot be written.
    """
    path.unlink(missing_ok=True)
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(_apart(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error
    # safetensors 0.8 lets only the owner read its files: https://github.com/safetensors/safetensors/issues/782.
    path.chmod(mode)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``tensors`` in the form that the library accepts: contiguous, and none in the memory of another."""
    apart = {
        name: readable(tensor).detach().resolve_conj().resolve_neg().contiguous() for name, tensor in tensors.items()
    }
    end = 0
    for name, tensor in sorted(apart.items(), key=lambda item: item[1].data_ptr()):
        if tensor.data_ptr() < end:
            apart[name] = tensor.clone()
        else:
            end = tensor.data_ptr() + tensor.nbytes
    return apart

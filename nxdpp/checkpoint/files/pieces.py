"""Pieces of the bytes of a file: their size, where a tensor has its bytes, and the memory of a tensor as bytes."""

import os
from typing import NamedTuple

import torch

PIECE_BYTES = 8 << 20
SMALL_BYTES = 1 << 20
"""A checksum of fewer bytes takes less time than another thread needs to begin."""


class FileSpan(NamedTuple):
    """Bytes of a tensor in a file, and the CRC-32 of each piece of ``PIECE_BYTES`` of them."""

    file: str
    start: int
    length: int
    checksums: tuple[int, ...]


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor in one dimension of stride 1, which ``view(-1)`` does not give for one element."""
    return tensor.as_strided((tensor.numel(),), (1,))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous ``tensor`` on the CPU."""
    return flat(tensor).view(torch.uint8).numpy().data


def read_bytes(descriptor: int, place: int, into: memoryview) -> int:
    """Fill ``into`` from ``place`` on, and return the number of bytes: fewer where the file ends before."""
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], place + done)
        if count == 0:
            break
        done += count
    return done

"""Sequences of the text, which every rank draws alike. Nothing here is collective."""

from collections.abc import Iterator

import torch
from torch.utils.data import Dataset


class RandomWindows(Dataset[torch.Tensor]):
    """``count`` sequences ``(seq_length,)``, int64, from random positions of ``text``.

    The sequences depend on the seed, not on the number of processes. The first ``done`` of them are left out.
    """

    def __init__(self, text: bytes, count: int, seq_length: int, seed: int, done: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._starts = torch.randint(len(text) - seq_length + 1, (count,), generator=generator)[done:]
        self._text, self._seq_length = _tensor(text), seq_length

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> torch.Tensor:
        return _windows(self._text, self._starts[index : index + 1], self._seq_length)[0]


def held_out_batches(text: bytes, batch_size: int, seq_length: int, count: int) -> Iterator[torch.Tensor]:
    """Yield ``count`` batches ``(batch_size, seq_length)``, int64, from evenly spaced positions of ``text``.

    They overlap if the text is too short.
    """
    whole = _tensor(text)
    starts = torch.linspace(0, len(text) - seq_length, count * batch_size, dtype=torch.float64).long()
    for batch_starts in starts.split(batch_size):
        yield _windows(whole, batch_starts, seq_length)


def _tensor(text: bytes) -> torch.Tensor:
    """The bytes of ``text``, uint8 of shape ``(bytes,)``."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _windows(text: torch.Tensor, starts: torch.Tensor, seq_length: int) -> torch.Tensor:
    return text[starts[:, None] + torch.arange(seq_length)].long()

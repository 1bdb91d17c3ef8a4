"""Bytes that a rank sends in collectives, and their steps.

The counts are for the ring algorithms, which send the fewest bytes. ``n`` ranks share a tensor of ``S`` bytes::

    all-reduce                    2 (n - 1) / n S
    all-gather, reduce-scatter      (n - 1) / n S       S is the whole tensor

A step is a message that waits for the one before. The algorithms are in "Bandwidth Optimal All-reduce Algorithms for
Clusters of Workstations" (Patarasuk and Yuan, 2009). A tree needs log2(n) steps each way.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Kind = Literal["all_reduce", "all_gather", "reduce_scatter"]


class SentBytes:
    """What this rank sends.

    Attributes:
        total: the least bytes, in collectives of its tensor groups.
        steps: of these collectives.
        tokens: bytes of the tokens of all its experts' exchanges, also those that stay on this rank.
        exchanges: number of these.
    """

    def __init__(self) -> None:
        self.total = 0.0
        self.steps = 0
        self.tokens = 0.0
        self.exchanges = 0


_counters: list[SentBytes] = []


def least_sent(kind: Kind, whole: float, ranks: int) -> float:
    """Return the least bytes that each of ``ranks`` sends, for a whole tensor of ``whole`` bytes."""
    return (2 if kind == "all_reduce" else 1) * whole * (ranks - 1) / ranks


def least_steps(kind: Kind, ranks: int) -> int:
    """Return the least number of messages, one after the other, of a collective over ``ranks`` ranks."""
    return (2 if kind == "all_reduce" else 1) * math.ceil(math.log2(ranks))


def note_collective(kind: Kind, whole: int, ranks: int) -> None:
    """Count a collective; for the functions that run one."""
    for counter in _counters:
        counter.total += least_sent(kind, whole, ranks)
        counter.steps += least_steps(kind, ranks)


def note_tokens(whole: float) -> None:
    """Count an exchange of ``whole`` bytes of tokens with the ranks of an expert group."""
    for counter in _counters:
        counter.tokens += whole
        counter.exchanges += 1


@contextmanager
def sent_bytes() -> Iterator[SentBytes]:
    """Count what this process sends in tensor groups, or would send for tensors without values."""
    counter = SentBytes()
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters.remove(counter)

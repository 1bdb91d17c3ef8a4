"""Peaks from the events of torch's profiler."""

import torch

from benchmarks.layouts.allocations import allocated, peak


def test_the_most_bytes_at_once() -> None:
    assert peak(iter([(1, 10), (2, 5), (1, -10), (3, 7), (2, -5)])) == 15


def test_an_address_that_another_thread_has_freed() -> None:
    assert peak(iter([(1, 10), (1, 20), (2, 5)])) == 25


def test_a_block_that_frees_what_it_allocates() -> None:
    kept = torch.zeros(1_000_000)
    with allocated() as memory:
        for _ in range(20):
            kept = torch.zeros(1_000_000)
            del kept
    assert memory.peak == 4_000_000

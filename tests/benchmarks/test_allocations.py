"""Peaks from the events of torch's profiler."""

import threading

import torch

from benchmarks.layouts.allocations import allocated, peak


def test_the_most_bytes_at_once() -> None:
    assert peak(iter([(1, 10), (2, 5), (1, -10), (3, 7), (2, -5)])) == 15


def test_an_address_that_another_thread_has_freed() -> None:
    assert peak(iter([(1, 10), (1, 20), (2, 5)])) == 25


def test_memory_freed_by_another_thread_does_not_add_up() -> None:
    box: list[torch.Tensor] = []
    with allocated() as memory:
        for _ in range(20):
            box.append(torch.zeros(1_000_000))
            thread = threading.Thread(target=box.clear)
            thread.start()
            thread.join()
    assert 4_000_000 <= memory.peak < 40_000_000

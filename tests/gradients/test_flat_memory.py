"""Memory of flat copies, used again from step to step."""

import torch

from nxdpp.gradients.buckets import FlatMemory

CPU = torch.device("cpu")


def test_memory_that_is_free_is_used_again() -> None:
    memory = FlatMemory()
    large, small = memory.take(CPU, 4096), memory.take(CPU, 1024)
    places = large.data_ptr(), small.data_ptr()
    memory.give_back(large.view(torch.float32))
    memory.give_back(small.view(torch.bfloat16))
    # The smallest that has the bytes; a part of it, and the whole again later.
    part = memory.take(CPU, 512)
    assert (part.data_ptr(), part.numel()) == (places[1], 512)
    assert memory.take(CPU, 2048).data_ptr() == places[0]
    assert memory.take(CPU, 64).data_ptr() not in places
    memory.give_back(part)
    assert memory.take(CPU, 1024).data_ptr() == places[1]


def test_growing_copies_leave_no_smaller_ones_behind() -> None:
    memory = FlatMemory()
    for count in range(1000, 1100):
        memory.give_back(memory.take(CPU, count))
    assert [each.numel() for each in memory._free] == [1099]


def test_two_copies_at_one_time_have_memory_of_their_own() -> None:
    memory = FlatMemory()
    one, other = memory.take(CPU, 256), memory.take(CPU, 256)
    one.fill_(1)
    other.fill_(2)
    assert one.sum() == 256
    assert memory.take(torch.device("meta"), 256).is_meta

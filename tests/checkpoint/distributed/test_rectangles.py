"""Flat ranges and divided parts as rectangles of a whole tensor."""

import random
from math import prod

import pytest
import torch
from torch import nn

from nxdpp import parallel_state
from nxdpp.checkpoint.distributed.rectangles import Block, PlaceInWhole, placement_of, rectangles
from nxdpp.tensor.tensor_attributes import set_tensor_model_parallel_attributes


@pytest.mark.parametrize("shape", [(), (7,), (4, 5), (3, 4, 5), (2, 1, 3, 2), (1, 6)])
def test_every_range_is_the_sum_of_its_rectangles(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(prod(shape)).view(shape)
    for start in range(prod(shape) + 1):
        for stop in range(start, prod(shape) + 1):
            found = list(rectangles(shape, start, stop))
            assert len(found) <= max(1, 2 * len(shape) - 1)
            values = []
            for first, offsets, sizes in found:
                region = numbers[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
                assert first == int(region.reshape(-1)[0])
                values += region.reshape(-1).tolist()
            assert values == list(range(start, stop))


def test_a_tensor_without_elements_is_one_rectangle() -> None:
    assert list(rectangles((0, 3), 0, 0)) == [(0, (0, 0), (0, 3))]
    assert list(rectangles((2, 3), 4, 4)) == []


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_ranges_of_all_parts_fill_the_whole(ranks: int) -> None:
    """Parts of a fused weight with padding, each cut into flat ranges as ZeRO-1 cuts them."""
    generator = random.Random(5)
    for dim, blocks, size in [(0, 1, 6), (1, 1, 7), (0, 3, 9), (1, 2, 10), (2, 1, 3)]:
        whole_shape = [4, 5, 3]
        whole_shape[dim] = size
        whole = torch.full(whole_shape, -1)
        expected = torch.arange(whole.numel()).view(whole_shape)
        chunk = -(-size // (blocks * ranks))
        for rank in range(ranks):
            parallel_state.initialize_debug(tensor_model_parallel_size=ranks, tensor_model_parallel_rank=rank)
            own = list(whole_shape)
            own[dim] = chunk * blocks
            parameter = nn.Parameter(torch.full(own, -2.0))
            set_tensor_model_parallel_attributes(parameter, True, dim, blocks, ranks)
            parameter.whole_size = size  # type: ignore[attr-defined]
            placement = placement_of(parameter)
            assert placement.shape == tuple(whole_shape)
            for block in placement.blocks(parameter):
                block.values.copy_(_region(expected, block))
            flat, at = parameter.detach().reshape(-1), 0
            while at < flat.numel():
                end = min(flat.numel(), at + generator.randint(1, 20))
                for block in placement.blocks(flat[at:end], at):
                    _region(whole, block).copy_(block.values)
                at = end
            parallel_state.destroy_model_parallel()
        assert torch.equal(whole, expected), (dim, blocks, size)


def test_a_tensor_that_is_not_contiguous_is_one_rectangle_of_itself() -> None:
    tensor = torch.zeros(3, 4).T
    (block,) = PlaceInWhole((4, 3), (4, 3), -1, ()).blocks(tensor)
    block.values.fill_(1)
    assert tensor.sum() == 12


def _region(whole: torch.Tensor, block: Block) -> torch.Tensor:
    return whole[tuple(slice(o, o + s) for o, s in zip(block.offsets, block.values.shape, strict=True))]

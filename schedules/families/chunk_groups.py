"""The order in which a rank with several chunks goes through its microbatches.

Megatron's order (Narayanan et al., arXiv 2104.04473): a group of p microbatches passes through all chunks before the
next group starts, so that the first rank has a microbatch of the group to forward when the last rank sends one back.
p = 2, 2 chunks, 4 microbatches; small letters are the first::

    group     0           1
    order     f0 f1 F0 F1 f2 f3 F2 F3

Where p does not divide the microbatches, groups are as even as can be and none is smaller than p (one group, where
there are fewer than p microbatches). A smaller group would leave ranks waiting at each chunk; a larger one holds
more microbatches live, g instead of p of them in all but one chunk. The largest come first: the number of warm-up
forwards is made for the first.
"""

# (chunk, microbatch)
ChunkStep = tuple[int, int]


def group_sizes(ranks: int, microbatches: int) -> list[int]:
    """How many microbatches each group has, the largest first."""
    groups = max(1, microbatches // ranks)
    size, larger = divmod(microbatches, groups)
    return [size + 1] * larger + [size] * (groups - larger)


def forward_order(ranks: int, chunks: int, microbatches: int) -> list[ChunkStep]:
    """The chunk and the microbatch of each forward of any rank, in order."""
    order: list[ChunkStep] = []
    start = 0
    for size in group_sizes(ranks, microbatches):
        order += [(chunk, microbatch) for chunk in range(chunks) for microbatch in range(start, start + size)]
        start += size
    return order


def backward_order(order: list[ChunkStep], chunks: int) -> list[ChunkStep]:
    """That of each backward: as the forwards, the chunks reversed."""
    return [(chunks - 1 - chunk, microbatch) for chunk, microbatch in order]

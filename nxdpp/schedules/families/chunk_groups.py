"""Order of the microbatches on a rank with several chunks (Narayanan et al., arXiv 2104.04473; Megatron's order).

A group of p microbatches passes through all chunks before the next group starts. p = 2, 2 chunks, 4 microbatches,
small letters are the first chunk::

    group     0           1
    order     f0 f1 F0 F1 f2 f3 F2 F3

If p does not divide the number of microbatches, group sizes differ by at most one. Each is at least p. Fewer than p
microbatches are one group. A smaller group would make ranks wait at each chunk. A larger one costs memory: g instead
of p microbatches are in flight in all but one chunk. The largest groups come first, since they set the warm-up.
"""

# (chunk, microbatch)
ChunkStep = tuple[int, int]


def group_sizes(ranks: int, microbatches: int) -> list[int]:
    """Return the number of microbatches of each group, the largest first."""
    groups = max(1, microbatches // ranks)
    size, larger = divmod(microbatches, groups)
    return [size + 1] * larger + [size] * (groups - larger)


def forward_order(ranks: int, chunks: int, microbatches: int) -> list[ChunkStep]:
    """Return the chunk and the microbatch of each forward, in the order that all ranks have."""
    order: list[ChunkStep] = []
    start = 0
    for size in group_sizes(ranks, microbatches):
        order += [(chunk, microbatch) for chunk in range(chunks) for microbatch in range(start, start + size)]
        start += size
    return order


def backward_order(order: list[ChunkStep], chunks: int) -> list[ChunkStep]:
    """Return the order of the backwards: the order of the forwards with the chunks reversed."""
    return [(chunks - 1 - chunk, microbatch) for chunk, microbatch in order]

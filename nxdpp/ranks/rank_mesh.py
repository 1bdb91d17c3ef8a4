"""Order of the ranks of a job over the dimensions pipeline, data and tensor.

8 ranks with size 2 in each dimension, in two orders::

    ("pipeline", "data", "tensor")                      ("data", "pipeline", "tensor")
    pipeline 0:  data 0: 0 1    data 1: 2 3             data 0:  pipeline 0: 0 1    pipeline 1: 2 3
    pipeline 1:  data 0: 4 5    data 1: 6 7             data 1:  pipeline 0: 4 5    pipeline 1: 6 7

The last dimension of an order has neighbouring ranks.

Expert and context parallelism divide the ranks of each data group again: consecutive ones share the experts of a
layer, or each sequence. 8 ranks of one data group with size 2::

    experts, or sequences, in two parts             [0 1] [2 3] [4 5] [6 7]
    copies of one part                              [0 2 4 6] [1 3 5 7]

Ranks of the data dimension have the same parameters, so this package calls them replicas. With context parallelism the
public getters of data parallelism count those alone that train different rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

DIMENSIONS = ("pipeline", "data", "tensor")


@dataclass(frozen=True)
class RankMesh:
    """The global rank at each place of a job, by the number of ranks along each dimension.

    Ranks are in row-major order of ``order``.
    """

    pipeline: int
    data: int
    tensor: int
    order: tuple[str, ...] = DIMENSIONS

    def size(self, dimension: str) -> int:
        """Number of ranks along ``dimension``."""
        size: int = getattr(self, dimension)
        return size

    @property
    def ranks(self) -> torch.Tensor:
        """The global ranks, int64 of shape (pipeline, data, tensor), whatever the order."""
        sizes = [self.size(dimension) for dimension in self.order]
        # On the CPU even inside torch.device("meta").
        ranks = torch.arange(torch.Size(sizes).numel(), device="cpu").view(sizes)
        return ranks.permute([self.order.index(dimension) for dimension in DIMENSIONS]).contiguous()

    def rank_at(self, pipeline: int, data: int, tensor: int) -> int:
        """The global rank at a place."""
        return int(self.ranks[pipeline, data, tensor])

    def groups(self, dimension: str) -> list[list[int]]:
        """Global ranks of every group along ``dimension``; the groups are in the order of their first ranks."""
        index = DIMENSIONS.index(dimension)
        groups: list[list[int]] = self.ranks.movedim(index, -1).reshape(-1, self.size(dimension)).tolist()
        return sorted(groups)

    def consecutive_groups(self, size: int) -> list[list[int]]:
        """Global ranks of every group of ``size`` consecutive replicas, which share experts or a sequence."""
        return sorted(data[first : first + size] for data in self.groups("data") for first in range(0, self.data, size))

    def strided_groups(self, size: int) -> list[list[int]]:
        """Global ranks of every group of replicas with the same index in their ``consecutive_groups``."""
        return sorted(data[index::size] for data in self.groups("data") for index in range(size))

    def models(self) -> list[list[int]]:
        """Global ranks of each replica, in ascending order: its pipeline ranks, and their tensor ranks."""
        models: list[list[int]] = self.ranks.movedim(1, 0).flatten(1).sort().values.tolist()
        return models


def checked_order(order: Sequence[str]) -> tuple[str, ...]:
    """Return ``order`` as a tuple. Raises ``ValueError`` unless it names each dimension once."""
    names = () if isinstance(order, str) else tuple(order)
    if sorted(map(str, names)) != sorted(DIMENSIONS):
        raise ValueError(
            f"order={order!r} must name the dimensions 'pipeline', 'data' and 'tensor' once each, the outermost first: "
            f"order={DIMENSIONS!r} is the default."
        )
    return names

"""Family of schedules: a name, a placement, and the compute actions of all ranks."""

from collections.abc import Callable
from dataclasses import dataclass

from nxdpp.schedules.actions import Action, Schedule
from nxdpp.schedules.placement import Placement


@dataclass(frozen=True)
class Family:
    """A family of schedules, by its name in ``schedule=`` and on the command line.

    ``make`` takes a placement and the number of microbatches, and returns the compute actions of all ranks. With
    ``any_chunks`` a rank may have any number of stages, not only the default. ``v_shaped`` is for a placement in a V.
    ``overlaps`` if a forward and the backward after it (``pairs``) may run at once: no rank then waits forever.
    """

    name: str
    summary: str
    make: Callable[[Placement, int], Schedule]
    default_chunks: int = 1
    any_chunks: bool = False
    v_shaped: bool = False
    overlaps: bool = False

    def placement(self, ranks: int, chunks: int | None = None) -> Placement:
        """Return the placement; ``ValueError`` for numbers of ranks or chunks that the family does not have."""
        chunks = self.default_chunks if chunks is None else chunks
        if ranks < 1:
            raise ValueError(f"a pipeline has at least 1 rank, not {ranks}.")
        if chunks < 1 or (chunks != self.default_chunks and not self.any_chunks):
            stages = "1 or more stages" if self.any_chunks else "1 stage" if self.default_chunks == 1 else "2 stages"
            raise ValueError(f"{self.name} has {stages} per rank, not {chunks}.")
        return Placement(ranks, chunks, self.v_shaped)

    def build(self, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
        """Return the compute actions of all ranks; ``ValueError`` for numbers that the family does not have."""
        if microbatches < 1:
            raise ValueError(f"a step has at least 1 microbatch, not {microbatches}.")
        return self.make(self.placement(ranks, chunks), microbatches)


def each_rank(make_rank: Callable[[Placement, int, int], list[Action]]) -> Callable[[Placement, int], Schedule]:
    """Make a schedule of ``make_rank(placement, rank, microbatches)``, the compute actions of one rank."""
    return lambda placement, microbatches: [make_rank(placement, rank, microbatches) for rank in range(placement.ranks)]

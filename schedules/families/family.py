"""What all families of schedules have in common: a name, a placement, and a list of compute actions a rank."""

from collections.abc import Callable
from dataclasses import dataclass

from nxdpp.schedules.actions import Action, Schedule
from nxdpp.schedules.placement import Placement


@dataclass(frozen=True)
class Family:
    """A family of schedules.

    Attributes:
        name: what ``schedule=`` and the command line call it.
        summary: what sets it apart, in a few words.
        make_rank: ``(placement, rank, microbatches)`` to the compute actions of that rank alone; ``None`` where
            the ranks can only be made together.
        make_all: ``(placement, microbatches)`` to those of all ranks; ``None`` where each can be made alone.
        fewest_chunks: stages that a rank must have at least.
        most_chunks: stages that a rank may have at most; ``None`` for any number.
        default_chunks: stages of a rank where nothing is asked for.
        v_shaped: whether the placement is V-shaped.
        splits_backward: whether input- and weight-gradients are actions of their own.
    """

    name: str
    summary: str
    make_rank: Callable[[Placement, int, int], list[Action]] | None = None
    make_all: Callable[[Placement, int], Schedule] | None = None
    fewest_chunks: int = 1
    most_chunks: int | None = 1
    default_chunks: int = 1
    v_shaped: bool = False
    splits_backward: bool = False

    def placement(self, ranks: int, chunks: int | None = None) -> Placement:
        """Which rank holds which stage; ``ValueError`` for a number of ranks or chunks that cannot be."""
        chunks = self.default_chunks if chunks is None else chunks
        if ranks < 1:
            raise ValueError(f"a pipeline of {ranks} ranks cannot be: give at least 1.")
        if chunks < self.fewest_chunks or (self.most_chunks is not None and chunks > self.most_chunks):
            raise ValueError(f"{self.name} has {self._possible_chunks()} a rank, not {chunks}.")
        return Placement(ranks, chunks, self.v_shaped)

    def rank_actions(self, rank: int, ranks: int, microbatches: int, chunks: int | None = None) -> list[Action]:
        """The compute actions of one rank, in order; most families make no other rank's list for it.

        Raises ``ValueError`` for numbers that cannot be.
        """
        placement = self.placement(ranks, chunks)
        _check_microbatches(microbatches)
        if not 0 <= rank < ranks:
            raise ValueError(f"there is no rank {rank} in a pipeline of {ranks}.")
        if self.make_rank is not None:
            return self.make_rank(placement, rank, microbatches)
        return self.build(ranks, microbatches, chunks)[rank]

    def build(self, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
        """The compute actions of all ranks; ``ValueError`` for numbers that cannot be."""
        placement = self.placement(ranks, chunks)
        _check_microbatches(microbatches)
        if self.make_rank is not None:
            return [self.make_rank(placement, rank, microbatches) for rank in range(ranks)]
        assert self.make_all is not None, "a family is made rank by rank, or at once"
        return self.make_all(placement, microbatches)

    def _possible_chunks(self) -> str:
        if self.most_chunks is None:
            return f"{self.fewest_chunks} or more stages"
        return "1 stage" if self.most_chunks == 1 else f"{self.most_chunks} stages"


def _check_microbatches(microbatches: int) -> None:
    if microbatches < 1:
        raise ValueError(f"a step of {microbatches} microbatches cannot be: give at least 1.")

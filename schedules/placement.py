"""Which rank holds which stage: stages follow each other along the model, ranks come back to each other.

Four ranks with two chunks each::

              rank 0   rank 1   rank 2   rank 3
    looped     0 4      1 5      2 6      3 7       from the last rank back to the first
    V          0 7      1 6      2 5      3 4       the last rank turns around: 3 and 4 need no transfer
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """``ranks`` times ``chunks`` stages; ``v_shaped`` turns around where the other placement starts again."""

    ranks: int
    chunks: int = 1
    v_shaped: bool = False

    @property
    def stages(self) -> int:
        """How many stages the model is cut into."""
        return self.ranks * self.chunks

    def rank_of(self, stage: int) -> int:
        """The rank that holds ``stage``."""
        chunk, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self.v_shaped and chunk % 2 else place

    def stages_of(self, rank: int) -> list[int]:
        """The stages of ``rank``, in the order of the model."""
        return [self.stage(rank, chunk) for chunk in range(self.chunks)]

    def stage(self, rank: int, chunk: int) -> int:
        """The stage that is the ``chunk``-th of ``rank``."""
        turned = self.v_shaped and chunk % 2
        return chunk * self.ranks + (self.ranks - 1 - rank if turned else rank)


@dataclass(frozen=True)
class ListedPlacement:
    """Any placement: ``rank_of_stage`` has the rank of each stage, of ``ranks``."""

    rank_of_stage: tuple[int, ...]
    ranks: int

    @property
    def stages(self) -> int:
        """How many stages the model is cut into."""
        return len(self.rank_of_stage)

    @property
    def chunks(self) -> int:
        """The most stages that a rank has."""
        return max(self.rank_of_stage.count(rank) for rank in range(self.ranks))

    def rank_of(self, stage: int) -> int:
        """The rank that holds ``stage``."""
        return self.rank_of_stage[stage]

    def stages_of(self, rank: int) -> list[int]:
        """The stages of ``rank``, in the order of the model."""
        return [stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank]

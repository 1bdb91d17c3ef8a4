"""Placement of stages on ranks.

Four ranks with two chunks each::

              rank 0   rank 1   rank 2   rank 3
    loop       0 4      1 5      2 6      3 7       stage 4 follows on the first rank
    V          0 7      1 6      2 5      3 4       stage 4 follows on the last rank, without a transfer
"""

from dataclasses import dataclass

from nxdpp.schedules.actions import Schedule


@dataclass(frozen=True)
class Placement:
    """``ranks * chunks`` stages in a loop, or in a V if ``v_shaped``."""

    ranks: int
    chunks: int = 1
    v_shaped: bool = False

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.ranks * self.chunks

    def rank_of(self, stage: int) -> int:
        """The rank that holds ``stage``."""
        chunk, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self.v_shaped and chunk % 2 else place

    def stages_of(self, rank: int) -> list[int]:
        """The stages of ``rank``, in the order of the model."""
        return [self.stage(rank, chunk) for chunk in range(self.chunks)]

    def stage(self, rank: int, chunk: int) -> int:
        """The stage of ``rank`` with the number ``chunk``."""
        turned = self.v_shaped and chunk % 2
        return chunk * self.ranks + (self.ranks - 1 - rank if turned else rank)


@dataclass(frozen=True)
class ListedPlacement:
    """Any placement on ``ranks`` ranks: ``rank_of_stage`` has the rank of each stage."""

    rank_of_stage: tuple[int, ...]
    ranks: int

    @property
    def stages(self) -> int:
        """Number of stages."""
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


def placement_of(schedule: Schedule) -> ListedPlacement:
    """Return the placement of a schedule, whose actions ``check`` accepts."""
    rank_of = {action.stage: rank for rank, actions in enumerate(schedule) for action in actions}
    return ListedPlacement(tuple(rank_of[stage] for stage in range(len(rank_of))), len(schedule))

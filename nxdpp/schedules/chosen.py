"""Schedule of a pipeline, as chosen by ``schedule`` and ``virtual_pipeline_size``."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from nxdpp.counted import check_whole, counted
from nxdpp.schedules.actions import Schedule
from nxdpp.schedules.check import check
from nxdpp.schedules.families.family import Family
from nxdpp.schedules.families.forward_only import evaluation
from nxdpp.schedules.families.registry import find_family
from nxdpp.schedules.placement import ListedPlacement, Placement, placement_of
from nxdpp.schedules.written import parse_schedule, read_schedule

# A schedule written by the user: a CSV file, or the actions of each rank.
Written = str | Path | Sequence[Sequence[str]]


class ChosenSchedule:
    """Placement and actions of all ranks for training and evaluation.

    Args:
        schedule: the name of a family, the path of a CSV file, or the actions of each rank. ``None`` is 1F1B, or
            interleaved 1F1B with several chunks.
        ranks: number of ranks of the pipeline.
        microbatches: number of microbatches of a step.
        chunks: stages per rank (``virtual_pipeline_size``); 1 takes the default of the family.

    Raises ``ValueError`` for a schedule that does not exist, cannot run, or is made for different numbers.
    """

    def __init__(self, schedule: Written | None, ranks: int, microbatches: int, chunks: int) -> None:
        check_whole("virtual_pipeline_size", chunks)
        self.ranks = ranks
        self.microbatches = microbatches
        self._family: Family | None = None
        self._written: Schedule = []
        if schedule is None:
            schedule = "1f1b" if chunks == 1 else "interleaved"
        if isinstance(schedule, str) and not schedule.endswith(".csv"):
            self._family = find_family(schedule)
            self.name = schedule
            wanted = None if chunks == 1 else chunks
            self.placement: Placement | ListedPlacement = self._family.placement(ranks, wanted)
        else:
            if isinstance(schedule, str | Path):
                self._written = read_schedule(Path(schedule))
            else:
                _check_lists(schedule)
                self._written = parse_schedule(schedule)
            # Ranks compare names. The actions have to agree, the path of the file may differ.
            self.name = f"written: {[' '.join(map(str, actions)) for actions in self._written]}"
            self.placement = self._placement_of_written(chunks)

    @property
    def overlaps(self) -> bool:
        """``True`` if a forward and the backward after it may run at once (``Family.overlaps``)."""
        return self._family is not None and self._family.overlaps

    @cached_property
    def training(self) -> Schedule:
        """Compute actions of each rank in ``run_train``."""
        if self._family is None:
            return self._written
        return self._family.build(self.ranks, self.microbatches, self.placement.chunks)

    @cached_property
    def evaluation(self) -> Schedule:
        """Compute actions of each rank in ``run_eval``: only forwards."""
        return evaluation(self.placement, self.microbatches)

    def of(self, microbatches: int, train: bool) -> Schedule:
        """Return the compute actions of each rank in a step of another number of microbatches.

        Raises ``ValueError`` for a number that the family cannot run, and for training by a written schedule.
        """
        if microbatches == self.microbatches:
            return self.training if train else self.evaluation
        if not train:
            return evaluation(self.placement, microbatches)
        if self._family is None:
            raise ValueError(
                f"the written schedule is for {counted(self.microbatches, 'microbatch')}, and a step has "
                f"{microbatches}. Use a family's name, or the same number of microbatches in each step."
            )
        return self._family.build(self.ranks, microbatches, self.placement.chunks)

    def _placement_of_written(self, chunks: int) -> ListedPlacement:
        sizes = check(self._written)
        given = {"ranks": sizes.ranks, "microbatches": sizes.microbatches}
        needed = {"ranks": self.ranks, "microbatches": self.microbatches}
        if given != needed:
            raise ValueError(f"the schedule is for {given}; this pipeline has {needed}.")
        if not sizes.trains:
            raise ValueError("the schedule has no backward: training needs it.")
        placement = placement_of(self._written)
        if chunks not in (1, placement.chunks):
            raise ValueError(
                f"virtual_pipeline_size={chunks}, but the schedule has up to "
                f"{counted(placement.chunks, 'stage')} per rank."
            )
        return placement


def _check_lists(schedule: Any) -> None:
    """Raise ``TypeError`` for anything but a list of lists of text."""
    lists = schedule if isinstance(schedule, list | tuple) else [schedule]
    if not all(isinstance(each, list | tuple) and all(isinstance(text, str) for text in each) for each in lists):
        raise TypeError(
            f"schedule={schedule!r:.80}: give the name of a family, the path of a CSV file, or a list of actions for "
            f"each rank, one text each."
        )

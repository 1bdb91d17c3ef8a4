"""Schedules chosen by a name, lists or a file, and the number of chunks."""

from pathlib import Path

import pytest

from nxdpp.schedules.actions import ActionKind, Schedule
from nxdpp.schedules.check import check
from nxdpp.schedules.chosen import ChosenSchedule
from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.placement import ListedPlacement

UNEVEN = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "2F0", "1F1", "2F1", "2B0", "1B0", "2B1", "1B1"]]


def test_default_is_1f1b_or_interleaved_with_several_chunks() -> None:
    assert ChosenSchedule(None, 2, 4, 1).training == FAMILIES["1f1b"].build(2, 4)
    assert ChosenSchedule(None, 2, 4, 3).training == FAMILIES["interleaved"].build(2, 4, 3)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_name_alone_has_the_default_chunks(name: str) -> None:
    family = FAMILIES[name]

    chosen = ChosenSchedule(name, 4, 6, 1)

    assert chosen.placement == family.placement(4, family.default_chunks)
    assert chosen.training == family.build(4, 6)
    assert check(chosen.evaluation) == (4, 4 * family.default_chunks, 6, False)
    assert all(chosen.placement.rank_of(a.stage) == rank for rank, each in enumerate(chosen.evaluation) for a in each)


def test_unsupported_numbers_of_chunks() -> None:
    with pytest.raises(ValueError, match="1f1b has 1 stage per rank, not 2"):
        ChosenSchedule("1f1b", 2, 4, 2)
    with pytest.raises(ValueError, match="zb-v has 2 stages per rank, not 3"):
        ChosenSchedule("zb-v", 2, 4, 3)
    assert ChosenSchedule("zb1p", 2, 4, 3).placement.chunks == 3


def test_lists_and_files_of_the_same_actions_have_one_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("\n".join(",".join(actions) for actions in UNEVEN))
    listed, read, read_by_name = (ChosenSchedule(each, 2, 2, 1) for each in (UNEVEN, path, str(path)))

    assert listed.training == read.training == read_by_name.training
    assert listed.name == read.name == read_by_name.name
    assert listed.placement == ListedPlacement((0, 1, 1), 2)
    # Ranks verify equal names before a step.
    other = [UNEVEN[0], ["1F0", "1F1", "2F0", *UNEVEN[1][3:]]]
    assert ChosenSchedule(other, 2, 2, 1).name != listed.name


def _backwards(schedule: Schedule) -> set[ActionKind]:
    return {action.kind for actions in schedule for action in actions} - {ActionKind.FORWARD}


def test_evaluation_of_a_written_schedule_has_all_forwards() -> None:
    chosen = ChosenSchedule(UNEVEN, 2, 2, 1)

    assert check(chosen.evaluation) == (2, 3, 2, False)
    assert _backwards(chosen.evaluation) == set()


@pytest.mark.parametrize(
    ("schedule", "chunks", "message"),
    [
        (UNEVEN, 3, "virtual_pipeline_size=3, but the schedule has up to 2 stages per rank"),
        ([["0F0", "0B0"], ["1F0", "1B0"]], 1, "'microbatches': 1.* this pipeline has .*'microbatches': 2"),
        ([["0F0", "0F1"], ["1F0", "1F1"]], 1, "the schedule has no backward: training needs it"),
        ([["0F0", "0B0", "0F1", "0B1"], []], 1, "rank 1 has no action; every rank of a pipeline has a stage"),
        (["0F0 0B0", "1F0 1B0"], 1, "rank 0 is the text '0F0 0B0'"),
        ("mine.csv", 1, "mine.csv: cannot be read as a CSV file"),
        ("mine", 1, "there is no schedule 'mine'"),
        ([], 1, "the schedule is empty"),
    ],
)
def test_invalid_schedules(schedule: list[list[str]], chunks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChosenSchedule(schedule, 2, 2, chunks)


@pytest.mark.parametrize("schedule", [5, [1, 2], [["0F0", 3], ["1F0"]]])
def test_unsupported_types(schedule: list[list[str]]) -> None:
    with pytest.raises(TypeError, match="schedule"):
        ChosenSchedule(schedule, 2, 2, 1)


@pytest.mark.parametrize("chunks", [0, -1, True, 1.5])
def test_invalid_numbers_of_chunks(chunks: int) -> None:
    with pytest.raises(ValueError, match=f"virtual_pipeline_size={chunks} must be a whole number"):
        ChosenSchedule(None, 2, 4, chunks)

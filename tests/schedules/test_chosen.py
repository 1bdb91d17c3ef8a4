"""Schedules chosen by a name, lists or a file, and the number of chunks."""

from pathlib import Path

import pytest

from nxdpp.schedules.check import check
from nxdpp.schedules.chosen import ChosenSchedule
from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.placement import ListedPlacement

UNEVEN = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "2F0", "1F1", "2F1", "2B0", "1B0", "2B1", "1B1"]]


def test_default_is_1f1b_or_interleaved_with_several_chunks() -> None:
    assert ChosenSchedule(None, 2, 4, 1).training == FAMILIES["1f1b"].build(2, 4)
    assert ChosenSchedule(None, 2, 4, 3).training == FAMILIES["interleaved"].build(2, 4, 3)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v"])
def test_a_name_alone_has_the_default_chunks(name: str) -> None:
    family = FAMILIES[name]

    chosen = ChosenSchedule(name, 4, 6, 1)

    assert chosen.placement == family.placement(4, family.default_chunks)
    assert chosen.training == family.build(4, 6)
    assert check(chosen.evaluation) == (4, 4 * family.default_chunks, 6, False)
    assert all(chosen.placement.rank_of(a.stage) == rank for rank, each in enumerate(chosen.evaluation) for a in each)


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


@pytest.mark.parametrize(
    ("schedule", "chunks", "message"),
    [
        (UNEVEN, 3, "virtual_pipeline_size=3, but the schedule has up to 2 stages per rank"),
        ([["0F0", "0B0"], ["1F0", "1B0"]], 1, "'microbatches': 1.* this pipeline has .*'microbatches': 2"),
        ([["0F0", "0F1"], ["1F0", "1F1"]], 1, "the schedule has no backward: training needs it"),
        ([["0F0", "0B0", "0F1", "0B1"], []], 1, "rank 1 has no action; every rank of a pipeline has a stage"),
        ("mine.csv", 1, "mine.csv: cannot be read as a CSV file"),
    ],
)
def test_invalid_schedules(schedule: list[list[str]], chunks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChosenSchedule(schedule, 2, 2, chunks)

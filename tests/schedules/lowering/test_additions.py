"""Actions of participants among the lowered ones: around the compute actions that they belong to."""

import pytest

from nxdpp.schedules.actions import COMPUTE, Action, ActionKind, parse_action
from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.lowering.additions import Addition, Around, add, compute_of

ROW = [parse_action(text) for text in ["0F0", "2F0", "0F1", "2B0", "0B0", "2F1", "2B1", "0B1"]]
GATHER = Addition(Around.FIRST, ActionKind.GATHER, ActionKind.GATHERED)
REDUCE = Addition(Around.LAST, ActionKind.REDUCE, ActionKind.RESHARD)
AVERAGE = Addition(Around.LAST_BACKWARD, ActionKind.AVERAGE, ActionKind.AVERAGED)
TIES = Addition(Around.END, None, ActionKind.SUM_TIES)


@pytest.mark.parametrize(
    ("additions", "expected"),
    [
        ([GATHER], "0GATHER0 0F0 0GATHERED0 2GATHER0 2F0 2GATHERED0 0F1 2B0 0B0 2F1 2B1 0B1"),
        ([REDUCE, AVERAGE], "0F0 2F0 0F1 2B0 0B0 2F1 2AVERAGE1 2REDUCE1 2B1 2RESHARD1 2AVERAGED1"),
        ([TIES], "0F0 2F0 0F1 2B0 0B0 2F1 2B1 0B1 0SUM_TIES1"),
        ([Addition(Around.EACH, None, ActionKind.SUBMIT)], "0F0 0SUBMIT0 2F0 2SUBMIT0 0F1 0SUBMIT1 2B0 2SUBMIT0"),
        ([], "0F0 2F0 0F1 2B0 0B0 2F1 2B1 0B1"),
    ],
)
def test_places(additions: list[Addition], expected: str) -> None:
    assert " ".join(map(str, add(ROW, additions))).startswith(expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_each_belongs_to_a_compute_action_of_its_stage(name: str) -> None:
    for row in FAMILIES[name].build(2, 4):
        added = add(row, [GATHER, REDUCE, AVERAGE, TIES])
        assert [action for action in added if action.kind in COMPUTE] == row
        for place, action in enumerate(added):
            if action.kind not in COMPUTE:
                compute = compute_of(added, place)
                assert (compute.stage, compute.microbatch) == (action.stage, action.microbatch)


def test_an_evaluation_has_no_sums_and_no_average() -> None:
    row = [Action(0, ActionKind.FORWARD, microbatch) for microbatch in range(2)]
    assert list(map(str, add(row, [AVERAGE, TIES]))) == ["0F0", "0F1"]

"""The figures of docs/guide/stages_and_schedules.md are those of the simulator."""

import re

from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.simulate import Timeline, simulate
from tests.docs.pages import GUIDE

PAGE = (GUIDE / "stages_and_schedules.md").read_text()


def _step(name: str, ranks: int, microbatches: int, transfer: float = 0.0) -> Timeline:
    family = FAMILIES[name]
    time = 1 / family.default_chunks
    return simulate(family.build(ranks, microbatches), time, time, time, transfer)


def _cells(line: str) -> list[str]:
    return [cell.strip(" `*") for cell in line.strip().split("|")[1:-1]]


def test_the_table_of_schedules() -> None:
    rows = [_cells(line) for line in PAGE.splitlines() if re.match(r"\| .*\| `", line) and "schedule=" not in line]
    assert len(rows) == 9
    for _, name, chunks, *figures in rows:
        many, few, slow = _step(name, 8, 32), _step(name, 8, 8), _step(name, 8, 32, 0.5)
        assert int(chunks) == FAMILIES[name].default_chunks
        expected = [f"{step.mean_bubble:.1%}".replace("%", " %") for step in (many, few, slow)]
        assert figures == [*expected, f"{max(many.peaks):g}"], name


def test_the_bubbles_of_1f1b() -> None:
    head = re.search(r"\| microbatches for each stage (.*)", PAGE)
    assert head is not None
    counts = [int(cell) for cell in _cells(head[1])]
    for stages in (4, 8):
        row = re.search(rf"\| bubble, {stages} stages (.*)", PAGE)
        assert row is not None
        bubbles = [_step("1f1b", stages, stages * count).mean_bubble for count in counts]
        assert _cells(row[1]) == [f"{bubble:.0%}".replace("%", " %") for bubble in bubbles]

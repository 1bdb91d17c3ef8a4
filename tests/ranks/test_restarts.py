"""Each start is clean: by torchrun after a fault, and in one process after ``destroy_model_parallel``."""

import ast
import re
from pathlib import Path

import pytest

from tests.support.run_program import run_program

AGENT, PROGRAM = (str(Path(__file__).with_name(name)) for name in ("restarting_agent.py", "restarted_program.py"))
# The rank of the fault takes turns. SIGKILL is a case of tests/hosts, and os._exit looks like SIGKILL to the others.
FAULTS = ["exception", "early_exception"]


def test_torchrun_restarts_after_each_fault(tmp_path: Path) -> None:
    faults = FAULTS
    ended = run_program(AGENT, [PROGRAM, str(tmp_path), *faults], 1)
    assert ended.codes == [0], ended.output
    happened = re.findall(r"start (\d): rank (\d) has (\w+)", ended.output)
    after_the_start = [
        (str(start), str(start % 2), fault) for start, fault in enumerate(faults) if not fault.startswith("early_")
    ]
    assert happened == after_the_start, ended.output
    well = re.findall(r"start (\d): rank (\d) ends well", ended.output)
    assert sorted(well) == [(str(len(faults)), "0"), (str(len(faults)), "1")], ended.output


@pytest.mark.parametrize("cycles", [6, pytest.param(200, marks=pytest.mark.sweep)])
def test_cycles_of_initialise_and_destroy_leave_nothing_behind(cycles: int, tmp_path: Path) -> None:
    program = str(Path(__file__).with_name("cycled_program.py"))
    ended = run_program(program, [str(cycles), str(tmp_path)], 2)
    assert ended.codes == [0, 0], ended.output
    left = dict(re.findall(r"rank (\d), \d+ cycles, left behind: (\{.*?\})", ended.output))
    assert len(left) == 2, ended.output
    for text in left.values():
        kept = ast.literal_eval(text)
        # The heap varies by some MiB.
        assert kept.pop("MiB", 0) <= 8, ended.output
        assert not kept, ended.output

"""The table of faults: a line of a fault has the ranks that name the faulty one."""

from benchmarks.faults import CASES, Case, run_plain


def test_a_plain_run_names_the_faulty_rank() -> None:
    outcome = run_plain(Case("SIGKILL", 2))
    assert outcome.naming == Case("SIGKILL", 2).named_by == [0, 1, 3], outcome.output
    assert 0.0 < outcome.seconds < 15.0


def test_each_fault_is_one_of_the_program() -> None:
    from tests.support import faulty_program

    known = {*faulty_program.IN_LAYER, *faulty_program.BETWEEN_STEPS, *faulty_program.STEPS_OFF}
    assert {case.name for case in CASES} - known == {"ImportError before the start"}

"""The table of faults: a line of a fault has the ranks that name the faulty one."""

import pytest

from benchmarks import faults
from benchmarks.faults import CASES, Case, Outcome, _outcome, main, run_plain


def test_a_plain_run_names_the_faulty_rank() -> None:
    outcome = run_plain(Case("SIGKILL", 2))
    assert outcome.naming == Case("SIGKILL", 2).named_by == [0, 1, 3], outcome.output
    assert 0.0 < outcome.seconds < 15.0


def test_the_time_of_a_hang_counts_from_the_limit() -> None:
    output = "fault at 100.0\nrank 0 stops because rank 2 hangs\n[default1]:rank 1 stops because rank 20 hangs\n"
    outcome = _outcome(Case("loop", 2, hangs=True), output, 105.5)
    assert (outcome.seconds, outcome.naming) == (0.5, [0])


def test_a_rank_that_does_not_name_the_faulty_one_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    naming = [0, 1, 2, 3]
    for run in ("run_plain", "run_torchrun"):
        monkeypatch.setattr(faults, run, lambda case: Outcome(1.0, naming, ""))
    monkeypatch.setattr(faults, "seconds_to_train_again", lambda case: 2.0)
    main(["--only", "sleep"])
    monkeypatch.setattr(faults, "seconds_to_train_again", lambda case: None)
    with pytest.raises(SystemExit, match="1"):
        main(["--only", "sleep"])
    naming.remove(3)
    with pytest.raises(SystemExit, match="1"):
        main(["--only", "sleep"])


def test_each_fault_is_one_of_the_program() -> None:
    from tests.support import faulty_program

    known = {*faulty_program.IN_LAYER, *faulty_program.BETWEEN_STEPS, *faulty_program.STEPS_OFF}
    assert {case.name for case in CASES} - known == {"ImportError before the start"}


def test_a_part_of_no_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "SIGNOTHING"])
    captured = capsys.readouterr()
    assert "python -m benchmarks.faults: error: --only SIGNOTHING: no fault has this in its name. " in captured.err
    assert "SIGKILL" in captured.err
    assert not captured.out

"""Each line of sweeps.toml names cases that there are, and leaves others of the same test to the suite."""

from pathlib import Path

import pytest

from tests.conftest import BOTH_PYTHONS, COLLECTED, SWEEPS

HERE = Path(__file__).parent


@pytest.mark.parametrize("pattern", SWEEPS)
def test_a_line_names_cases(pattern: str, request: pytest.FixtureRequest) -> None:
    file, _, name = pattern.partition("::")
    function, _, case = name.partition(r"\[")
    assert f"def {function}(" in (HERE / file).read_text()
    assert case, "a whole test has a mark of its own"
    # A run of single files has not collected the others.
    collected = request.config.stash[COLLECTED]
    assert file not in collected or pattern in collected


def test_the_paths_of_both_pythons_are_there() -> None:
    assert all((HERE / name).exists() for name in BOTH_PYTHONS)

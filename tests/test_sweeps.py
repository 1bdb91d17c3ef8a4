"""Each line of sweeps.toml names tests that there are."""

from pathlib import Path

import pytest

from tests.conftest import ONE_PYTHON, SWEEPS

HERE = Path(__file__).parent


@pytest.mark.parametrize("pattern", SWEEPS)
def test_a_sweep_is_of_a_test(pattern: str) -> None:
    file, _, name = pattern.partition("::")
    function = name.partition(r"\[")[0]
    source = (HERE / file).read_text()
    assert function == ".*" or f"def {function}(" in source


def test_the_paths_of_one_python_are_there() -> None:
    assert all((HERE / name).exists() for name in ONE_PYTHON)

"""A limit of time is a number of seconds, at least 1, or 0."""

from typing import Any

import numpy as np
import pytest

from nxdpp.ranks.faults.timeouts import Timeouts
from nxdpp.ranks.parallel_state import destroy_model_parallel, initialize_model_parallel


@pytest.mark.parametrize("seconds", [0, 1, 2.5, 300.0, np.int64(300), np.float32(2.5)])
def test_limits(seconds: float) -> None:
    Timeouts(seconds, seconds).check()


@pytest.mark.parametrize("name", ["hang", "compile"])
@pytest.mark.parametrize("seconds", [-1, 0.5, float("nan"), float("inf")])
def test_other_numbers_are_refused(name: str, seconds: float) -> None:
    with pytest.raises(ValueError, match=f"{name}_timeout must be at least 1 second"):
        Timeouts(**{name: seconds}).check()


@pytest.mark.parametrize("name", ["hang", "compile"])
@pytest.mark.parametrize("seconds", [None, True, "300", np.True_, 3j])
def test_what_is_no_number_is_refused(name: str, seconds: Any) -> None:
    with pytest.raises(TypeError, match=f"{name}_timeout must be a number of seconds"):
        Timeouts(**{name: seconds}).check()


def test_a_second_call_with_another_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    initialize_model_parallel(hang_timeout=60)
    try:
        initialize_model_parallel(hang_timeout=60.0)
        with pytest.raises(RuntimeError, match="hang_timeout=60, which differs from 300: call destroy_model_parallel"):
            initialize_model_parallel()
        with pytest.raises(RuntimeError, match="compile_timeout=3600, which differs from 60: call destroy_model_para"):
            initialize_model_parallel(hang_timeout=60, compile_timeout=60)
    finally:
        destroy_model_parallel()
    initialize_model_parallel()
    destroy_model_parallel()

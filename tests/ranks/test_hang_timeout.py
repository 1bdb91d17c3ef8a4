"""A limit of time is a number of seconds, at least 1, or 0."""

import numpy as np
import pytest

from nxdpp.ranks.parallel_state import destroy_model_parallel, initialize_model_parallel
from nxdpp.ranks.start_checks import check_hang_timeout


@pytest.mark.parametrize("seconds", [0, 1, 2.5, 300.0, np.int64(300), np.float32(2.5)])
def test_limits(seconds: float) -> None:
    check_hang_timeout(seconds)


@pytest.mark.parametrize("seconds", [-1, 0.5, float("nan"), float("inf")])
def test_other_numbers_are_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="hang_timeout must be at least 1 second"):
        check_hang_timeout(seconds)


@pytest.mark.parametrize("seconds", [None, True, "300", np.True_, 3j])
def test_what_is_no_number_is_refused(seconds: object) -> None:
    with pytest.raises(TypeError, match="hang_timeout must be a number of seconds"):
        check_hang_timeout(seconds)


def test_a_second_call_with_another_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    initialize_model_parallel(hang_timeout=60)
    try:
        initialize_model_parallel(hang_timeout=60.0)
        with pytest.raises(RuntimeError, match="hang_timeout=60, which differs from 300: call destroy_model_parallel"):
            initialize_model_parallel()
    finally:
        destroy_model_parallel()
    initialize_model_parallel()
    destroy_model_parallel()

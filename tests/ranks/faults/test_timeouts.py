"""A limit of time is a number of seconds, at least 1, or 0."""

from typing import Any

import numpy as np
import pytest

from nxdpp.ranks.faults.timeouts import Timeouts
from nxdpp.ranks.parallel_state import destroy_model_parallel, initialize_model_parallel


@pytest.mark.parametrize("name", ["hang", "compile"])
def test_limits(name: str) -> None:
    good: list[Any] = [0, 2.5, np.int64(300)]
    for taken in good:
        Timeouts(**{name: taken}).check()
    numbers: list[Any] = [-1, 0.5, float("nan"), float("inf")]
    for other in numbers:
        with pytest.raises(ValueError, match=f"{name}_timeout must be at least 1 second"):
            Timeouts(**{name: other}).check()
    no_numbers: list[Any] = [None, True, "300"]
    for other in no_numbers:
        with pytest.raises(TypeError, match=f"{name}_timeout must be a number of seconds"):
            Timeouts(**{name: other}).check()


def test_a_second_call_with_another_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    initialize_model_parallel(hang_timeout=60)
    try:
        initialize_model_parallel(hang_timeout=60.0)
        with pytest.raises(RuntimeError, match="hang_timeout=60, which differs from hang_timeout=300: call destroy"):
            initialize_model_parallel()
        with pytest.raises(RuntimeError, match="=3600, which differs from compile_timeout=60: call destroy"):
            initialize_model_parallel(hang_timeout=60, compile_timeout=60)
    finally:
        destroy_model_parallel()
    initialize_model_parallel()
    destroy_model_parallel()

"""Sizes of ``initialize_model_parallel``."""

from typing import Any

import numpy as np
import pytest

from nxdpp.ranks.start_checks import check_sizes


@pytest.mark.parametrize("size", ["2", 2.0, None, True])
def test_sizes_are_whole_numbers(size: Any) -> None:
    for argument, tensor, pipeline in (("tensor", size, 1), ("pipeline", 1, size)):
        message = f"{argument}_model_parallel_size={size!r} must be a whole number of at least 1"
        with pytest.raises(TypeError, match=message):
            check_sizes(tensor, pipeline, 4)
    check_sizes(np.int64(2), 2, 4)  # type: ignore[arg-type]  # NumPy's numbers are taken

"""Fixtures of the tests of tensor-parallel models."""

from collections.abc import Iterator

import pytest

from nxdpp import parallel_state


@pytest.fixture
def one_of_two() -> Iterator[None]:
    """The first of two tensor-parallel ranks, without the other one."""
    parallel_state.initialize_debug(tensor_model_parallel_size=2)
    yield
    parallel_state.destroy_model_parallel()

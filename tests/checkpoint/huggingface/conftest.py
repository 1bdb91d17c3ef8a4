"""Ends of the job of one rank that tests begin in the process of pytest."""

from collections.abc import Iterator

import pytest

from nxdpp import parallel_state


@pytest.fixture(scope="module", autouse=True)
def end_of_the_job() -> Iterator[None]:
    """End the job after the last test of a file: those of other files begin their own."""
    yield
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()


@pytest.fixture
def no_groups_left() -> Iterator[None]:
    """End the job after each test."""
    yield
    parallel_state.destroy_model_parallel()

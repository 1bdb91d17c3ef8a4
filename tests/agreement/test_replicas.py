"""Data-parallel replicas with other parameters are refused."""

import pytest

from nxdpp import parallel_state
from nxdpp.agreement.replicas import check_replicas
from tests.support.run_ranks import run_ranks

LINES = ["parameter weight: [4]", "parameter bias: [4]"]


def replicas(rank: int) -> str:
    parallel_state.initialize_model_parallel()
    check_replicas(LINES)
    with pytest.raises(RuntimeError) as raised:
        check_replicas(LINES if rank < 2 else LINES[:1])
    return str(raised.value)


def test_replicas_with_other_parameters_are_refused() -> None:
    for message in run_ranks(3, replicas):
        assert "data-parallel rank 2 (rank 2) has other parameters than data-parallel rank 0 (rank 0)" in message
        assert "rank 0 (rank 0): parameter bias: [4]\n  data-parallel rank 2 (rank 2): (no such line)\n" in message

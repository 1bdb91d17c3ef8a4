"""Data-parallel replicas with other parameters are refused."""

import pytest

from nxdpp import parallel_state
from nxdpp.pipeline.agreement.replicas import check_replicas
from tests.support.run_ranks import run_ranks

pytestmark = pytest.mark.one_python


def replicas(rank: int) -> str:
    parallel_state.initialize_model_parallel()
    group = parallel_state.get_data_parallel_group()
    check_replicas(["weight", "bias"], group)
    with pytest.raises(RuntimeError) as raised:
        check_replicas(["weight", "bias"] if rank < 2 else ["weight"], group)
    return str(raised.value)


def test_replicas_with_other_parameters_are_refused() -> None:
    for message in run_ranks(3, replicas):
        assert "data-parallel rank 2 (rank 2) has other parameters than data-parallel rank 0 (rank 0)" in message
        assert "rank 0 (rank 0): bias\n  data-parallel rank 2 (rank 2): (no such line)\n" in message

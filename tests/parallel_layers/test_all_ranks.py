"""Results and errors of rank 0 on all ranks."""

from typing import Any

import pytest
import torch.distributed as dist

from nxdpp.parallel_layers.all_ranks import from_first_rank
from nxdpp.parallel_layers.parallel_state import initialize_model_parallel
from tests.support.run_ranks import run_ranks


def ask(rank: int) -> Any:
    initialize_model_parallel()

    def fail(error: Exception) -> None:
        raise error

    with pytest.raises(ValueError, match=r"too small" if rank == 0 else r"on rank 0, ValueError: too small"):
        from_first_rank(lambda: fail(ValueError("too small")))
    with pytest.raises(KeyError if rank == 0 else RuntimeError, match="KeyError: 'lost'" if rank else "lost"):
        from_first_rank(lambda: fail(KeyError("lost")))
    return from_first_rank(lambda: {"rank": dist.get_rank()})


def test_the_result_or_error_of_rank_0_reaches_all_ranks() -> None:
    assert run_ranks(3, ask) == [{"rank": 0}] * 3

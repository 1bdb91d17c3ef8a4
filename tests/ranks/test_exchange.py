"""Values, results and errors of each rank on all ranks, without a group over all ranks."""

from typing import Any, NoReturn

import pytest
import torch.distributed as dist

from nxdpp.ranks import parallel_state
from nxdpp.ranks.exchange import Exchange
from nxdpp.ranks.parallel_state import initialize_model_parallel
from nxdpp.ranks.wire_form import packed
from tests.support.run_ranks import run_ranks


def _fail(error: Exception) -> NoReturn:
    raise error


def ask(rank: int) -> Any:
    initialize_model_parallel()
    # Neither a new group nor a collective call of a group over all ranks, on any backend.
    patch = pytest.MonkeyPatch()
    for name in ("new_group", "all_gather_object", "broadcast_object_list", "all_gather", "get_backend"):
        patch.setattr(dist, name, lambda *args, name=name, **kwargs: _fail(AssertionError(name)))

    exchange = Exchange()
    assert exchange.gather((rank, "x" * rank)) == [(0, ""), (1, "x"), (2, "xx")]
    with pytest.raises(ValueError, match=r"too small" if rank == 0 else r"on rank 0, ValueError: too small"):
        exchange.from_first(lambda: _fail(ValueError("too small")))
    with pytest.raises(KeyError if rank == 0 else RuntimeError, match="KeyError: 'lost'" if rank else "lost"):
        exchange.from_first(lambda: _fail(KeyError("lost")))
    with pytest.raises(OSError if rank else RuntimeError, match="disk 1 is full" if rank < 2 else "disk 2 is full"):
        Exchange(consequence="nothing was written").together(
            lambda: _fail(OSError(f"disk {rank} is full")) if rank else None
        )
    error, words = (TypeError, "builtins.function has no form") if rank == 1 else (RuntimeError, "rank 1, ")
    with pytest.raises(error, match=words):
        exchange.together(lambda: _without_form(rank))
    result = exchange.from_first(lambda: {"rank": dist.get_rank()})
    patch.undo()
    parallel_state.destroy_model_parallel()
    return result


def _without_form(rank: int) -> None:
    if rank == 1:
        packed(lambda: None)


def test_the_result_or_error_of_a_rank_reaches_all_ranks() -> None:
    assert run_ranks(3, ask) == [{"rank": 0}] * 3

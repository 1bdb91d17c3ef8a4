"""Several cases of ranks in one start of them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from nxdpp import parallel_state
from tests.support.run_ranks import run_ranks, want

Case = Callable[..., Any] | tuple[Any, ...]


def run_in_turn(world_size: int, *cases: Case) -> list[list[Any]]:
    """Run ``cases``, functions of a rank or tuples of one with its arguments; return each rank's results in order.

    Each case initialises ``parallel_state``, which is destroyed after it, and begins with one seed. A note of an error
    names its case.
    """
    calls = [case if isinstance(case, tuple) else (case,) for case in cases]
    want(*{function.__module__ for function, *_ in calls})
    return run_ranks(world_size, _in_turn, calls)


def _in_turn(rank: int, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    found = []
    for function, *arguments in calls:
        torch.manual_seed(0)
        try:
            found.append(function(rank, *arguments))
        except BaseException as error:
            error.add_note(f"in {function.__name__} of {arguments}")
            raise
        parallel_state.destroy_model_parallel()
    return found

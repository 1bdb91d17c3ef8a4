"""Work of each rank of which all ranks learn that it failed."""

from collections.abc import Callable
from typing import TypeVar

from nxdpp import parallel_state

T = TypeVar("T")


def on_all_ranks(act: Callable[[], T], consequence: str) -> T:
    """Return the result of ``act`` on this rank, or raise on all ranks; collective over all ranks.

    A rank on which ``act`` fails raises its own error. Other ranks raise ``RuntimeError`` with ``consequence`` and the
    message of the first rank that failed.
    """
    own: Exception | None = None
    try:
        result = act()
    except Exception as error:
        own = error
    messages = parallel_state.get_exchange().gather(None if own is None else f"{type(own).__name__}: {own}")
    if own is not None:
        raise own
    for rank, message in enumerate(messages):
        if message is not None:
            raise RuntimeError(f"{consequence}: on rank {rank}, {message}")
    return result

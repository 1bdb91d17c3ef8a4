"""Errors that only tell that another rank has gone or failed."""

from collections.abc import Iterator
from typing import TypeVar

import torch.distributed as dist

E = TypeVar("E", bound=BaseException)

_WORDS = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "ncclRemoteError",
    "ncclSystemError",
)


def told(error: E) -> E:
    """Mark ``error`` as one that another rank has told this rank, and return it."""
    error._nxdpp_is_told = True  # type: ignore[attr-defined]  # nxdpp's mark
    return error


def is_told(error: BaseException) -> bool:
    """Return whether another rank has told this rank of ``error``, or of the first of its causes that tells of one."""
    for cause in causes_of(error):
        if hasattr(cause, "_nxdpp_is_told"):
            return True
        if _is_of_connection(cause):
            return False
    return False


def is_connection_error(error: BaseException) -> bool:
    """Return whether ``error``, or one of its causes, only tells that another rank has gone."""
    return any(map(_is_of_connection, causes_of(error)))


def is_collective_error(error: BaseException) -> bool:
    """Return whether ``error``, or one of its causes, comes from a collective of torch whose peer has gone.

    A user's program may have connections of its own, which raise other connection errors.
    """
    return any(isinstance(cause, dist.DistNetworkError) or _has_words(cause) for cause in causes_of(error))


def _is_of_connection(error: BaseException) -> bool:
    kinds = (ConnectionError, dist.DistNetworkError, dist.DistStoreError)
    return isinstance(error, kinds) or _has_words(error)


def _has_words(error: BaseException) -> bool:
    is_error = isinstance(error, RuntimeError) and not isinstance(error, ConnectionError)
    return is_error and any(words in str(error) for words in _WORDS)


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error`` and its causes, the last one first."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__

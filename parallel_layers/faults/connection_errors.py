"""Errors that only tell that another rank has gone."""

import torch.distributed as dist

_WORDS = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "ncclRemoteError",
    "ncclSystemError",
)


def is_connection_error(error: BaseException) -> bool:
    """Return whether ``error``, or one of its causes, only tells that another rank has gone."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, ConnectionError | dist.DistNetworkError | dist.DistStoreError):
            return True
        if isinstance(cause, RuntimeError) and any(words in str(cause) for words in _WORDS):
            return True
        cause = cause.__cause__ or cause.__context__
    return False

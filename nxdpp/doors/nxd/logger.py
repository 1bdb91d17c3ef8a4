"""Logger for scripts, under the import path of NeuronX Distributed."""

import logging
import os
import sys

_FORMAT = "%(asctime)s %(levelname)s %(message)s"


class _FirstRank(logging.Filter):
    """Passes the records of rank 0, and of a process without other ranks."""

    def filter(self, record: logging.LogRecord) -> bool:
        distributed = getattr(sys.modules.get("torch"), "distributed", None)
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return bool(distributed.get_rank() == 0)
        return os.environ.get("RANK", "0") == "0"


def get_logger(name: str = "nxdpp.script", rank0_only: bool = True, log_level: int | str = "INFO") -> logging.Logger:
    """Return the logger ``name``, which writes to stderr.

    Args:
        name: of the logger. Handlers that it has already are kept.
        rank0_only: write only the records of rank 0.
        log_level: lowest level that is written, of ``logging``.
    """
    logger = logging.getLogger(name)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(log_level)
    for kept in [kept for kept in logger.filters if isinstance(kept, _FirstRank)]:
        logger.removeFilter(kept)
    if rank0_only:
        logger.addFilter(_FirstRank())
    return logger

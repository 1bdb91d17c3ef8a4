"""Lines of transformers' loggers, printed by one rank: each rank builds the same model and would print the same.

The first rank that logs a text prints it. A text that a rank logs again is a new one.
"""

import hashlib
import logging
from collections import Counter

from torch.distributed import (  # type: ignore[attr-defined]  # public, though not in its __all__
    PrefixStore,
    Store,
)

LIBRARY = "transformers"


class FirstRankToSay(logging.Filter):
    """Passes a record if no rank has counted it in ``store`` yet, or if the store is gone."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        # Others may block on the world's own connection.
        connection = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        self._store = PrefixStore("said", connection)
        self._counts: Counter[bytes] = Counter()
        self._last: logging.LogRecord | None = None
        self._is_first = True

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether this rank is the first to log the text of ``record`` for the n-th time."""
        if record is self._last:
            # Another handler.
            return self._is_first
        self._last, self._is_first = record, self._counted(record)
        return self._is_first

    def _counted(self, record: logging.LogRecord) -> bool:
        text = hashlib.blake2b(f"{record.name}:{record.levelno}:{record.getMessage()}".encode()).digest()
        self._counts[text] += 1
        try:
            return bool(self._store.add(f"{text.hex()[:32]}-{self._counts[text]}", 1) == 1)
        except RuntimeError:
            return True


def say_once(store: Store) -> None:
    """Let the handlers of transformers' logger print each text on one rank; not collective.

    A filter of an earlier world is replaced. Handlers that are added later print on each rank.
    """
    first = FirstRankToSay(store)
    for handler in logging.getLogger(LIBRARY).handlers:
        for old in [each for each in handler.filters if isinstance(each, FirstRankToSay)]:
            handler.removeFilter(old)
        handler.addFilter(first)

"""Lines and bars of transformers, printed by one rank: each rank builds the same model and would print the same.

The first rank to say a text prints it, whichever it is; rank 0 may be later. A text that a rank says again is a new
one. A rank prints all it says once the store has not answered in time.

Progress bars are drawn by rank 0 of the world.
"""

import hashlib
import logging
import os
import sys
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from typing import Any, TextIO

from torch.distributed import Store  # type: ignore[attr-defined]  # public, though not in its __all__

LIBRARY = "transformers"
_FOLDER = f"{os.sep}{LIBRARY}{os.sep}"
_SECONDS = 5.0
_ANSWER = "nxdpp_is_first"
# Libraries that draw bars, with the user's own setting of them.
_BARS = {
    "transformers.utils.logging": "HF_HUB_DISABLE_PROGRESS_BARS",
    "datasets.utils": "HF_DATASETS_DISABLE_PROGRESS_BARS",
}
_hidden: list[Any] = []


class FirstRankToSay(logging.Filter):
    """Passes a record or a warning if no rank has counted it in ``store`` yet, and in a fork of the rank."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        # Others may block on the world's own connection.
        self._store: Store | None = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        # A fork, such as a worker of a DataLoader, has the same connection.
        self._process = os.getpid()
        self._counts: defaultdict[str, Iterator[int]] = defaultdict(count)
        earlier = getattr(warnings.showwarning, "__self__", None)
        self._show_any: Callable[..., None] = warnings.showwarning
        if isinstance(earlier, FirstRankToSay):
            self._show_any = earlier._show_any

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether this rank is the first to log the text of ``record`` for the n-th time."""
        # Each handler asks.
        if not hasattr(record, _ANSWER):
            setattr(record, _ANSWER, self._is_first(record.name, record.levelno, record.msg, record.args))
        return bool(getattr(record, _ANSWER))

    def show(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        """Show a warning as ``warnings.showwarning`` did before; of transformers' files only on the first rank."""
        _, is_theirs, place = filename.rpartition(_FOLDER)
        if not is_theirs or self._is_first(place, category.__name__, message):
            self._show_any(message, category, filename, lineno, file, line)

    def _is_first(self, *said: object) -> bool:
        try:
            text = hashlib.blake2b(repr(said).encode()).hexdigest()[:32]
        except Exception:
            # An object with no repr: logging tells of it.
            return True
        store = self._store
        if store is None or os.getpid() != self._process:
            return True
        key, numbers = f"said-{text}-{next(self._counts[text])}", []

        def ask() -> None:
            with suppress(RuntimeError):
                numbers.append(store.add(key, 1))

        # The timeout of a store does not limit ``add``.
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(_SECONDS)
        if not numbers:
            self._store = None
        return numbers in ([], [1])


def say_once(store: Store) -> None:
    """Let transformers' handlers and ``warnings`` print each text of transformers on one rank; not collective.

    The filter of an earlier world is replaced. Handlers that are added later print on each rank.
    """
    first = FirstRankToSay(store)
    warnings.showwarning = first.show
    for handler in logging.getLogger(LIBRARY).handlers:
        for old in [each for each in handler.filters if isinstance(each, FirstRankToSay)]:
            handler.removeFilter(old)
        handler.addFilter(first)


def hide_bars() -> None:
    """Draw no progress bars of transformers, the Hugging Face hub and datasets on this rank until ``show_bars``.

    Only of libraries that are imported, and not against the user's variable or call.
    """
    for name, setting in _BARS.items():
        library: Any = sys.modules.get(name)
        if library is not None and setting not in os.environ and library.is_progress_bar_enabled():
            library.disable_progress_bar()
            _hidden.append(library)


def show_bars() -> None:
    """Draw the progress bars again that ``hide_bars`` took away."""
    while _hidden:
        _hidden.pop().enable_progress_bar()

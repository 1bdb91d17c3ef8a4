"""Closest known name to an unknown one, for a message."""

from collections.abc import Iterable
from difflib import get_close_matches

_SIMILARITY = 0.5


def closest(name: str, known: Iterable[str], similarity: float = _SIMILARITY) -> str | None:
    """Return the one of ``known`` that ``name`` may have been meant for; ``similarity`` is at most 1."""
    return next(iter(get_close_matches(name, list(known), 1, similarity)), None)


def meant(name: str, known: Iterable[str], similarity: float = _SIMILARITY) -> str:
    """Return ``" (did you mean 'labels'?)"`` with the closest name; ``""`` without a close one."""
    found = closest(name, known, similarity)
    return "" if found is None else f" (did you mean {found!r}?)"

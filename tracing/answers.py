"""Answers about sizes in the order of their questions; a second run of the same code need not compute them again."""

from collections.abc import Callable
from typing import Any, Self

from nxdpp.tracing.sizes import UnknownSizeError


class Answers:
    """The answers of one run.

    Args:
        earlier: the answers of an earlier run. They serve while the questions are the same.
    """

    def __init__(self, earlier: Self | None = None) -> None:
        self._given: list[tuple[Any, Any]] = []
        self._earlier = [] if earlier is None else earlier._given

    def get(self, question: Any, compute: Callable[[], Any]) -> Any:
        """The answer to ``question``, by default from ``compute``. Raises ``UnknownSizeError`` as that does."""
        position = len(self._given)
        if position < len(self._earlier) and self._earlier[position][0] == question:
            answer = self._earlier[position][1]
        else:
            try:
                answer = compute()
            except UnknownSizeError as error:
                answer = error
        self._given.append((question, answer))
        if isinstance(answer, UnknownSizeError):
            raise answer
        return answer

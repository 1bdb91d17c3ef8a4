"""A proxy that Python may use as a number, a key or a text where its value follows from sizes of the inputs.

``int(n ** 0.5)``, ``round(n / 2)``, ``np.sqrt(n)``, ``table[n]``, ``n in {1, 2}`` and ``f"{n}"`` need the value itself.
It becomes a fact of the graph.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy
import torch
from torch import fx

from nxdpp.tracing.sizes.sizes import UnknownSizeError, whole_number
from nxdpp.tracing.values.metadata import is_metadata

# The beginning of the name of a value that only the data tells.
UNKNOWN_TEXT = "Proxy("
_CONSTANTS = (bool, int, float, str, tuple, torch.dtype, torch.layout, torch.device, type(None))


_OF_DATA = (
    ". For a log take the loss that run_train returns, or a module of its own that returns its argument (loss = "
    "self.log(loss)): it runs for each microbatch on the stage of the value. In the computation keep the tensor in "
    "place of the number."
)


class NumberProxy(fx.Proxy):
    """A traced value that is a number for Python, where its value follows from sizes of the inputs."""

    def __index__(self) -> int:
        return int(self._fact(whole_number, "a whole number"))

    def __int__(self) -> int:
        tracer: Any = self.tracer
        try:
            return int(tracer.fact(self.node, whole_number))
        except UnknownSizeError:
            return int(self._number())

    def __float__(self) -> float:
        return float(self._number())

    def __round__(self, digits: int | None = None) -> Any:
        return round(self._number(), digits)

    def __trunc__(self) -> int:
        return math.trunc(self._number())

    def __floor__(self) -> int:
        return math.floor(self._number())

    def __ceil__(self) -> int:
        return math.ceil(self._number())

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[Any, Any]:
        return other // self, other % self

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return numpy.asarray(self._fact(constant_value, "an array of NumPy"), *args)

    def __hash__(self) -> int:
        """The hash of the value of a number, a shape or a dtype. A tensor has its own, and so has an ended trace."""
        tracer: Any = self.tracer
        if tracer.finished or not is_metadata(self.node):
            return object.__hash__(self)
        return hash(self._fact(constant_value, "a key"))

    def __str__(self) -> str:
        return str(self._for_text())

    def __format__(self, form: str) -> str:
        known = self._for_text()
        return known if isinstance(known, str) else format(known, form)

    def _for_text(self) -> Any:
        """The value for a text. A value that only the data tells has its name: the text is usually of an error."""
        tracer: Any = self.tracer
        if not tracer.finished and is_metadata(self.node):
            with suppress(UnknownSizeError):
                return tracer.fact(self.node, constant_value)
        return f"{UNKNOWN_TEXT}{self.node.name})"

    def _number(self) -> float:
        number: float = self._fact(_number, "a number")
        return number

    def _fact(self, read: Callable[[Any], Any], needed: str) -> Any:
        tracer: Any = self.tracer
        try:
            return tracer.fact(self.node, read)
        except UnknownSizeError as error:
            raise tracer.refused(
                TypeError(
                    f"{self.node.name} is needed as {needed}, which only the data tells ({error})"
                    f"{_OF_DATA if read is _number else ''}"
                )
            ) from error


def _number(value: Any) -> Any:
    if not isinstance(value, int | float):
        raise UnknownSizeError(f"a {type(value).__name__} is not a number")
    return value


def constant_value(value: Any) -> Any:
    """Return a value that a key or a text needs. Raise ``UnknownSizeError`` for a tensor."""
    if not isinstance(value, _CONSTANTS):
        raise UnknownSizeError(f"a {type(value).__name__} is not a constant")
    return value

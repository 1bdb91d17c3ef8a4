"""Attributes that modules have for a while, in front of their own."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from nxdpp.ground.torch_names import COMPILED_CALL

CALL = COMPILED_CALL.name
"""The attribute that torch calls in place of a module with its hooks, as after ``compile()``."""


@contextmanager
def attributes(given: Sequence[tuple[nn.Module, str, Any]]) -> Iterator[None]:
    """Give values to attributes of modules. An attribute is found before a parameter of its name."""
    before = [vars(module).get(name) for module, name, _ in given]
    for module, name, value in given:
        vars(module)[name] = value
    try:
        yield
    finally:
        for (module, name, _), earlier in zip(given, before, strict=True):
            if earlier is None:
                del vars(module)[name]
            else:
                vars(module)[name] = earlier

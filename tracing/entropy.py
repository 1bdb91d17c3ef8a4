"""Random numbers without a seed that code outside layers makes: refused where the generator is made.

A number that is only compared (``numpy.random.default_rng().random() < 0.05``) has the same answer in most runs. So the
comparison of two runs would not find it.
"""

import os
import random
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy
import numpy.random.bit_generator

from nxdpp.tracing.own_code import caller_outside, is_watched
from nxdpp.tracing.swap import swapped

# Modules through which code makes generators.
_MAKERS = ("numpy", "random", "secrets")
_IDENTIFIERS = ("uuid1", "uuid4", "uuid6", "uuid7", "uuid8")


@contextmanager
def refused_entropy(namespaces: Iterable[dict[str, Any]] = ()) -> Iterator[None]:
    """Refuse generators without a seed, and the system's random numbers, in the watched code.

    The code may have functions that draw such numbers in ``namespaces``. Raises ``RuntimeError`` at the call.
    """
    of_numpy: dict[str, Any] = vars(numpy.random.bit_generator)
    seed = random.Random.seed

    def seed_with(self: random.Random, a: Any = None, version: int = 2) -> None:
        if a is None and not isinstance(self, random.SystemRandom):
            _refuse("a random.Random without a seed")
        seed(self, a, version)

    with ExitStack() as stack:
        stack.enter_context(patch.object(random.Random, "seed", seed_with))
        stack.enter_context(_refused(vars(random), "_urandom", "the system's random generator"))
        stack.enter_context(_refused(of_numpy, "randbits", "a generator of NumPy without a seed"))
        drawing = [getattr(os, name) for name in ("urandom", "getrandom") if hasattr(os, name)]
        drawing += [getattr(uuid, name) for name in _IDENTIFIERS if hasattr(uuid, name)]
        replaced = {id(function): _refusing(function, f"{function.__name__}()") for function in drawing}
        for namespace in (vars(os), vars(uuid), *namespaces):
            found = {name: replaced[id(value)] for name, value in namespace.items() if id(value) in replaced}
            stack.enter_context(swapped(namespace, found))
        yield


@contextmanager
def _refused(namespace: dict[str, Any], name: str, what: str) -> Iterator[None]:
    with swapped(namespace, {name: _refusing(namespace[name], what)}):
        yield


def _refusing(function: Callable[..., Any], what: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        _refuse(what)
        return function(*args, **kwargs)

    return call


def _refuse(what: str) -> None:
    if is_watched(caller_outside(_MAKERS)):
        raise RuntimeError(
            f"{what} is used outside the transformer layers; traced, its numbers would be drawn once for all steps. "
            f"Draw them in a layer, or in a module without layers, or give them to forward as an input."
        )

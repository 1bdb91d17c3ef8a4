"""Refusal of random numbers of Python and NumPy, which a trace would draw once for all steps."""

import random
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import numpy
from torch import nn

from nxdpp.tracing.spine import sources
from nxdpp.tracing.swap import swapped

_NOTHING = re.compile(r"$")


def _drawing(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """The functions of ``module`` that draw from its global generator."""
    owner = module.random.__self__
    return {name: function for name, function in vars(module).items() if getattr(function, "__self__", None) is owner}


_FUNCTIONS = {
    function: f"{module.__name__}.{name}"
    for module in (random, numpy.random)
    for name, function in _drawing(module).items()
}


@contextmanager
def refused_random_numbers(model: nn.Module) -> Iterator[None]:
    """Refuse the global generators of Python and NumPy, also their functions that the code of ``model`` imports.

    A layer that is skipped if ``random.random() < p`` would be skipped in all steps, or in none.

    Raises ``RuntimeError`` at the call.
    """
    thread = threading.get_ident()
    with ExitStack() as stack:
        for module in (random, numpy.random, *sources(list(model.modules()), _NOTHING)):
            found = {name: f for name, f in vars(module).items() if getattr(f, "__self__", None) and f in _FUNCTIONS}
            stack.enter_context(swapped(vars(module), {name: _refusal(f, thread) for name, f in found.items()}))
        yield


def _refusal(function: Callable[..., Any], thread: int) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        # The thread of a data loader may draw. transformers draws only to drop layers, and ``refuse_untraceable``
        # refuses rates other than 0.
        drops_layers = str(sys._getframe(1).f_globals.get("__name__")).startswith("transformers.models.")
        if threading.get_ident() != thread or drops_layers:
            return function(*args, **kwargs)
        raise RuntimeError(
            f"{_FUNCTIONS[function]} is called outside the transformer layers; traced, it would be drawn once and for "
            f"all"
        )

    return call

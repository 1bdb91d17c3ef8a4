"""Runs of code on fake tensors, for its sizes: copies of modules, guesses for questions about data, no caches.

A criterion that matches objects gives numbers to NumPy, and fake tensors have no data for it. It has no parameters, so
that it may run on example data for the structure of its output.
"""

import copy
import functools
import logging
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, Self

import numpy
import torch
from torch import nn

from nxdpp.ground.torch_names import BUFFERS, FAKE_MODE, NO_DISPATCH_MODES, PARAMETERS, TorchDispatchMode, pytree
from nxdpp.tracing.graph.swap import sources
from nxdpp.tracing.modules import listings
from nxdpp.tracing.state.object_state import CachedFunction, content_of

# Torch's log of operations that cannot run on fake tensors. Their errors are told otherwise.
LOG = logging.getLogger(FAKE_MODE.path.rpartition(".")[0])
# Guesses in one run of the nodes that lead to an answer.
_MOST_GUESSES = 100


class FakeCopies:
    """Fake copies of modules and tensors, with shapes and dtypes and without memory; needs a ``FakeTensorMode``.

    Each tensor has one copy. All copies are on the CPU, also of tensors on the meta device.
    """

    def __init__(self) -> None:
        self._memo: dict[int, Any] = {}
        self._modules: dict[nn.Module, nn.Module] = {}
        self._originals: list[torch.Tensor] = []

    def module(self, module: nn.Module) -> nn.Module:
        """A copy of ``module`` with fake parameters, buffers and tensor attributes."""
        if module not in self._modules:
            for part in listings.modules(module):
                for value in (*PARAMETERS.of(part).values(), *BUFFERS.of(part).values(), *vars(part).values()):
                    # Containers may hold results of the last run, which have a graph and cannot be copied.
                    for tensor in pytree.tree_leaves(value) if isinstance(value, tuple | list | dict) else (value,):
                        if isinstance(tensor, torch.Tensor):
                            self.tensor(tensor)
            self._modules[module] = copy.deepcopy(module, dict(self._memo))
        return self._modules[module]

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor like ``tensor``; the same one at each call."""
        if id(tensor) not in self._memo:
            fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            self._memo[id(tensor)] = fake
            # No other tensor gets its id while it is kept.
            self._originals.append(tensor)
        copied: torch.Tensor = self._memo[id(tensor)]
        return copied


class TooManyGuessesError(Exception):
    """Data decide when the run ends."""


class AskedDataError(RuntimeError):
    """Code asks data of a fake tensor."""


class GuessingMode(TorchDispatchMode):
    """Fake tensors whose every element is ``guess`` for code that ``asks``; ``None`` answers no code."""

    def __init__(self, guess: bool | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.guess = guess
        self._guesses = 0
        self.asks = True

    @functools.cached_property
    def _fakes(self) -> Any:
        return FAKE_MODE(allow_non_fake_inputs=True)

    def __enter__(self) -> Self:
        self._guesses = 0
        self._fakes.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)  # type: ignore[no-untyped-call]
        self._fakes.__exit__(*details)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``, or answer a question about data."""
        asks_data = torch.Tag.data_dependent_output in func.tags
        if not asks_data or not self.asks or self.guess is None:
            try:
                return func(*args, **(kwargs or {}))
            except Exception as error:
                if asks_data:
                    raise AskedDataError(f"{type(error).__name__}: {error}") from error
                raise
        # A loop that data end would not end with a guess.
        self._guesses += 1
        if self._guesses > _MOST_GUESSES:
            raise TooManyGuessesError(f"more than {_MOST_GUESSES} answers depend on data")
        return self.guess


@contextmanager
def unchanged_generators() -> Iterator[None]:
    """Restore the global generators of Python and NumPy afterwards. Fake tensors draw from none of torch's."""
    of_python, of_numpy = random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        numpy.random.set_state(of_numpy)


_SEED = 0


def takes_examples(module: nn.Module) -> bool:
    """Return whether ``module`` has no parameters, and is not one of torch."""
    of_torch = type(module).__module__.partition(".")[0] == "torch"
    return not of_torch and next(listings.parameters(module), None) is None


def run_on_examples(module: nn.Module, args: Any, kwargs: Any, guess: bool) -> Any:
    """Return fake tensors like the outputs of ``module`` for examples in place of fake tensors.

    Whole numbers are 0: an index that is always right. Booleans are ``guess``. Other numbers are between 0 and 1, as
    coordinates and probabilities are. The random generators of torch are unchanged.
    """
    examples: dict[int, torch.Tensor] = {}

    def example(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in examples:
            examples[id(leaf)] = _example(leaf, guess)
        return examples[id(leaf)]

    with NO_DISPATCH_MODES(), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(_SEED)
        args, kwargs = pytree.tree_map(example, (args, kwargs))
        for part in listings.modules(module):
            pytree.tree_map(example, (dict(BUFFERS.of(part)), dict(vars(part))))
        output = copy.deepcopy(module, dict(examples))(*args, **kwargs)
    return pytree.tree_map(_fake, output)


def _example(tensor: torch.Tensor, guess: bool) -> torch.Tensor:
    value: float = 0
    if tensor.dtype == torch.bool:
        value = guess
    elif tensor.is_floating_point() or tensor.is_complex():
        value = 0.5 if guess else 0.25
    return torch.full(tensor.shape, value, dtype=tensor.dtype, device="cpu")


def _fake(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="cpu")


_FRAMEWORKS = re.compile(r"(torch|nxdpp)\b")
# Globals of a Python module, with the functions to call instead of the ones with a cache.
Uncached = list[tuple[dict[str, Any], dict[str, Any]]]


def uncached_functions(root: nn.Module) -> Uncached:
    """The functions with a cache that are globals next to the classes of modules in ``root``, without their caches.

    ``all_swapped`` puts them in place.
    """
    found = []
    for source in sources(list(listings.modules(root)), _FRAMEWORKS):
        plain = {name: _without_cache(value) for name, value in vars(source).items()}
        changes = {name: function for name, function in plain.items() if function is not None}
        if changes:
            found.append((vars(source), changes))
    return found


def _without_cache(value: Any) -> Any:
    """The function whose results ``value`` keeps; ``None`` if it keeps none."""
    if isinstance(value, CachedFunction):
        return value.__wrapped__
    if not isinstance(value, FunctionType):
        return None
    # transformers puts a function around the one with a cache; a trace puts its own around that.
    is_recorded = (value.__module__ or "").startswith("nxdpp.tracing.")
    inside = (_without_cache(content_of(cell)) for cell in value.__closure__ or ())
    kept = (function for function in inside if is_recorded or function is getattr(value, "__wrapped__", None))
    return next((function for function in kept if function is not None), None)

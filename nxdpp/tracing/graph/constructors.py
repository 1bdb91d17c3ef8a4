"""Tensors and random numbers that code outside the layers makes: recorded or refused while tracing.

Functions of a sequence of tensors are here too: such a sequence may be one traced value. So are methods with sizes of
tensors that are neither parameters nor buffers, which the spine keeps in a dict or in plain attributes:
``self.tokens.expand(batch_size, -1)`` needs a number where the trace has a value. The call becomes a node that holds
the tensor. fx itself handles a single traced tensor, and functions with one among their arguments.
"""

import random
import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import numpy
import torch
from torch import fx, nn

from nxdpp.devices import accelerator
from nxdpp.tracing.code.frames import caller, module_of
from nxdpp.tracing.graph.calls import has_proxy, record_opaque_call
from nxdpp.tracing.graph.swap import all_swapped, in_this_thread, replaced, sources, swapped_in_this_thread
from nxdpp.tracing.modules import listings
from nxdpp.tracing.values.type_answers import traced_isinstance

_CONSTRUCTORS = (
    "arange", "as_tensor", "empty", "empty_like", "eye", "full", "linspace", "ones", "tensor", "tril_indices",
    "triu_indices", "zeros",
)  # fmt: skip
_RANDOM = ("bernoulli", "normal", "rand", "rand_like", "randint", "randn", "randn_like", "randperm")
_OF_METADATA = ("broadcast_shapes", "finfo", "iinfo")
_OF_SEQUENCES = (
    "cat", "column_stack", "concat", "concatenate", "dstack", "hstack", "row_stack", "stack", "vstack",
)  # fmt: skip
_SEEDS = ("manual_seed", "seed", "set_rng_state")
_DEVICE_SEEDS = ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all")
DRAWN = "be drawn once for all steps"
"""What the refusal of a random tensor says."""
_DRAWN_ONCE = (
    f"{DRAWN}. Draw in a module without layers, or in a layer. A layer that is dropped at random "
    "draws itself, and returns its input."
)
_REPLACED = (*_CONSTRUCTORS, *_RANDOM, *_OF_METADATA, *_OF_SEQUENCES, "is_tensor")
_ORIGINALS = {id(getattr(torch, name)): name for name in _REPLACED}


def recorded_constructors(tracer: fx.Tracer) -> AbstractContextManager[None]:
    """Record new tensors as nodes, which each stage makes; ``RuntimeError`` for random ones outside the layers."""
    replacements = {name: _recorder(tracer, getattr(torch, name)) for name in _CONSTRUCTORS}
    replacements |= {name: _refusal(name, _DRAWN_ONCE) for name in _RANDOM}
    replacements |= {name: _recorder(tracer, getattr(torch, name), has_proxy) for name in _OF_METADATA}
    replacements |= {name: _recorder(tracer, getattr(torch, name), _takes_a_sequence) for name in _OF_SEQUENCES}
    replacements["is_tensor"] = lambda value: traced_isinstance(value, torch.Tensor)
    return swapped_in_this_thread(vars(torch), replacements)


def refused_random_tensors() -> AbstractContextManager[None]:
    """Refuse random tensors without a traced argument: a tracer that does not record them would draw them once."""
    replacements = {name: _refusal(name, _DRAWN_ONCE, getattr(torch, name)) for name in _RANDOM}
    return swapped_in_this_thread(vars(torch), replacements)


def refused_seeds(namespaces: Iterable[dict[str, Any]]) -> AbstractContextManager[None]:
    """Refuse to set the state of torch's generators, also by ``fork_rng``: no step would do so.

    ``namespaces`` may have the functions under names of their own.
    """
    # torch.compile replaces torch.manual_seed, and not torch.random.manual_seed.
    names = {id(vars(module)[name]): name for module in (torch, torch.random) for name in _SEEDS}

    def refused(name: str, seed: Callable[..., Any]) -> Callable[..., Any]:
        return in_this_thread(_refusal(name, "have no effect"), seed)

    own = [
        (known, {n: refused(names[id(v)], v) for n, v in known.items() if id(v) in names})
        for known in (vars(torch), vars(torch.random), *namespaces)
    ]
    of_devices = [
        (known, {name: refused(f"{kind}.{name}", known[name]) for name in _DEVICE_SEEDS if name in known})
        for kind, known in accelerator.namespaces().items()
    ]
    return all_swapped([*own, *of_devices])


def under_all_names(namespaces: Iterable[dict[str, Any]]) -> AbstractContextManager[None]:
    """Replace functions of torch in ``namespaces`` (``from torch import arange``) as they are now in ``torch``."""
    return replaced(namespaces, {function: vars(torch)[name] for function, name in _ORIGINALS.items()})


def _recorder(
    tracer: fx.Tracer, function: Callable[..., Any], is_meant: Callable[[Any, Any], bool] = lambda args, kwargs: True
) -> Callable[..., Any]:
    def record(*args: Any, **kwargs: Any) -> Any:
        if is_meant(args, kwargs):
            return tracer.create_proxy("call_function", function, args, kwargs)
        return function(*args, **kwargs)

    return record


def _takes_a_sequence(args: Any, kwargs: Any) -> bool:
    # torch's C code takes a traced sequence of tensors for a tensor by its class, and refuses it.
    return isinstance(args[0] if args else kwargs.get("tensors"), fx.Proxy)


def _refusal(name: str, reason: str, if_traced: Callable[..., Any] | None = None) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if if_traced is not None and has_proxy(args, kwargs):
            return if_traced(*args, **kwargs)
        raise RuntimeError(f"torch.{name} is used outside the transformer layers; traced, it would {reason}")

    return refuse


_NOTHING = re.compile(r"$")
_GENERATORS = (random.Random, numpy.random.RandomState)


# The functions that draw from the global generators.
_FUNCTIONS = {
    function: f"{module.__name__}.{name}"
    for module in (random, numpy.random)
    for name, function in vars(module).items()
    if getattr(function, "__self__", None) is module.random.__self__
}


def refused_random_numbers(model: nn.Module) -> AbstractContextManager[None]:
    """Refuse the global generators of Python and NumPy, also their functions that the code of ``model`` imports.

    A layer that is skipped if ``random.random() < p`` would be skipped in all steps, or in none.

    Raises ``RuntimeError`` at the call.
    """
    modules = (random, numpy.random, *sources(list(listings.modules(model)), _NOTHING))
    # Two reads of a method make two objects.
    return all_swapped(
        (vars(module), {name: _refuse_function(f) for name, f in vars(module).items() if _draws(f)})
        for module in modules
    )


def _draws(value: Any) -> bool:
    return isinstance(getattr(value, "__self__", None), _GENERATORS) and value in _FUNCTIONS


def _refuse_function(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        # transformers draws only to drop layers, and ``refuse_untraceable`` refuses rates other than 0.
        if module_of(caller(1)).startswith("transformers.models."):
            return function(*args, **kwargs)
        raise RuntimeError(
            f"{_FUNCTIONS[function]} is used outside the transformer layers; traced, it would {_DRAWN_ONCE}"
        )

    return in_this_thread(call, function)


_WITH_SIZES = (
    "expand", "narrow", "new_empty", "new_full", "new_ones", "new_zeros", "repeat", "reshape", "tile", "view",
)  # fmt: skip


class _Method:
    """A method of a tensor, called with the tensor first."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(tensor, self.__name__)(*args, **kwargs)


def recorded_sizes() -> AbstractContextManager[Any]:
    """Record methods of tensors that take sizes, where a size is a traced value."""
    methods: dict[str, Any] = {name: _recorded(name, getattr(torch.Tensor, name)) for name in _WITH_SIZES}
    patched: AbstractContextManager[Any] = patch.multiple(torch.Tensor, **methods)
    return patched


def _recorded(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if has_proxy(args, kwargs):
            return record_opaque_call(_Method(name), (tensor, *args), kwargs)
        return method(tensor, *args, **kwargs)

    return in_this_thread(call, method)

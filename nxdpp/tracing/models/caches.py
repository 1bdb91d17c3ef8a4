"""Key-value caches that the spine hands to layers: filled ones (the prefixes of PEFT's prefix tuning) and empty ones.

A cache is an object that all layers change. In a graph each layer gets a cache of its own, made of the keys and values
that the spine put in for this layer, and functions that make masks get one without data::

    prompt_encoder ── split ──┬── keys, values of layer 0 ── cache ── layers.0
                              ├── keys, values of layer 1 ── cache ── layers.1
                              └── shapes ── cache without data ── create_causal_mask

A layer that uses the part of a different layer raises. The cache is no output of the model.

Some models make a cache although ``use_cache`` is off (XLM, FlauBERT). It is empty at each layer, and a layer only adds
its keys and values to it. The layers get ``None``, as from a model that heeds ``use_cache=False``.
"""

import copy
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import fx, nn
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache
from transformers.utils.generic import ModelOutput

from nxdpp.ground.torch_names import pytree
from nxdpp.tracing.graph.absent_values import value_or_absent
from nxdpp.tracing.graph.calls import record_opaque_call, recorded
from nxdpp.tracing.graph.swap import in_this_thread

_CACHES = (Cache, EncoderDecoderCache)
_TENSORS = ("keys", "values")
_OF_TENSORS = ("dtype", "device")


class Caches:
    """The caches of one trace."""

    def __init__(self) -> None:
        # By the id of a cache: the cache, which keeps its id, and the modules that use its parts.
        self._users: dict[int, tuple[Any, dict[int, nn.Module]]] = {}

    def for_layer(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of a call of ``module``, with a traced cache in place of each that the spine filled.

        Raises ``RuntimeError`` for two modules that use the same part of a cache.
        """
        if not any(_is_cache(leaf) for leaf in pytree.tree_leaves((args, kwargs))):
            return args, kwargs
        numbers = sorted({n for child in module.modules() if isinstance(n := getattr(child, "layer_idx", None), int)})

        def traced(leaf: Any) -> Any:
            if not _is_cache(leaf):
                return leaf
            self._note(leaf, module, numbers)
            return _record(_Template(leaf, numbers), leaf)

        args, kwargs = pytree.tree_map(traced, (args, kwargs), is_leaf=_is_cache)
        return args, kwargs

    def _note(self, cache: Any, module: nn.Module, numbers: Collection[int]) -> None:
        _, users = self._users.setdefault(id(cache), (cache, {}))
        for number in numbers:
            if users.setdefault(number, module) is not module:
                raise RuntimeError(
                    f"two modules use part {number} of a {type(cache).__name__}; one would not see what the other one "
                    f"puts in"
                )


def recorded_with_shapes(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, recorded as one node for each call with a traced value; a cache has the shapes of its tensors.

    The result may be ``None`` (``tracing/graph/absent_values.py``). Other threads call ``function`` itself.
    """
    record = recorded(function)

    def shapes(leaf: Any) -> Any:
        if not _is_cache(leaf):
            return leaf
        return _record(_Template(leaf, None), leaf)

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs = {name: shapes(value) for name, value in kwargs.items()}
        return value_or_absent(record(*map(shapes, args), **kwargs), function)

    return in_this_thread(call, function)


def without_cache(output: Any) -> Any:
    """``output`` of a model without the cache in it."""
    if not isinstance(output, ModelOutput):
        return output
    caches = [name for name, value in output.items() if _is_cache(value)]
    if not caches:
        return output
    fields = {name: value for name, value in output.items() if name not in caches}
    return type(output)(**fields)


def _is_cache(value: Any) -> bool:
    # A traced value would look through the stack for the answer to isinstance.
    return issubclass(type(value), _CACHES)


@dataclass(frozen=True)
class _Traced:
    """The place of a traced value, number ``index`` in a cache, or of a tensor without data that has it as shape."""

    index: int
    is_shape: bool


@dataclass(frozen=True)
class _Object:
    """An object of ``cls`` with ``attributes``."""

    cls: type
    attributes: dict[str, Any]


class _OfAnotherLayer:
    """The part of a cache that another layer uses."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)  # of Python's own protocols, such as copying
        raise RuntimeError("a layer reads the part of a key-value cache that belongs to another layer")


class _Template:
    """Make a cache like ``cache``, in which the spine has put traced values.

    ``numbers`` are the parts that a layer uses. ``None`` makes a cache of tensors without data.
    """

    def __init__(self, cache: Any, numbers: Collection[int] | None) -> None:
        self.__name__ = "cache" if numbers is not None else "cache_of_shapes"
        self._numbers = numbers
        self._values: list[fx.Proxy] = []
        self._opened = self._open(cache, "")

    def __call__(self, *values: Any) -> Any:
        return _build(self._opened, values)

    def take_values(self) -> tuple[fx.Proxy, ...]:
        """The traced values in their order, once; a graph holds no proxies."""
        values = tuple(self._values)
        self._values = []
        return values

    def _open(self, value: Any, name: str) -> Any:
        if isinstance(value, fx.Proxy):
            without_data = self._numbers is None and name in _TENSORS
            self._values.append(value.shape if without_data else value)
            return _Traced(len(self._values) - 1, without_data)
        if isinstance(value, (*_CACHES, CacheLayerMixin)):
            left_out = _OF_TENSORS if self._numbers is None else ()
            attributes = {key: self._open(item, key) for key, item in vars(value).items() if key not in left_out}
            return _Object(type(value), attributes)
        if type(value) is list and name == "layers" and self._numbers is not None:
            return [self._open(v, "") if i in self._numbers else _OfAnotherLayer() for i, v in enumerate(value)]
        if type(value) is list:
            return [self._open(item, "") for item in value]
        return copy.copy(value) if type(value) is dict else value


def _build(opened: Any, values: tuple[Any, ...]) -> Any:
    if isinstance(opened, _Traced):
        value = values[opened.index]
        return torch.empty(value, device="meta") if opened.is_shape else value
    if isinstance(opened, _Object):
        made: Any = object.__new__(opened.cls)
        vars(made).update({key: _build(item, values) for key, item in opened.attributes.items()})
        return made
    if type(opened) is list:
        return [_build(item, values) for item in opened]
    return dict(opened) if type(opened) is dict else opened


def _record(template: _Template, cache: Any) -> Any:
    values = template.take_values()
    if not values:
        raise RuntimeError(
            f"a {type(cache).__name__} is handed on between layers, which keep it for later tokens; a pipeline has no "
            f"cache. Call the model with past_key_values=None"
        )
    return record_opaque_call(template, values, {})


def without_empty_caches(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of ``module`` with ``None`` in place of empty caches, where that is the default."""
    if not any(_is_empty_cache(value) for value in (*args, *kwargs.values())):
        return args, kwargs
    # A forward may be wrapped on the module while it is traced; its class has the names.
    given = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    for name, value in given.arguments.items():
        if given.signature.parameters[name].default is None and _is_empty_cache(value):
            given.arguments[name] = None
    return given.args[1:], given.kwargs


def _is_empty_cache(value: Any) -> bool:
    # A traced value would look through the stack for the answer to isinstance.
    return issubclass(type(value), Cache) and value.get_seq_length() == 0

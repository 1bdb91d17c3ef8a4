"""A proxy that records in-place changes, and knows what follows from the specs and sizes of the inputs."""

import logging
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn

from nxdpp.ground.torch_names import BASE, pytree
from nxdpp.tracing.code.frames import Frame, caller, calls_c_code, file_of, outwards, unpacked_length
from nxdpp.tracing.code.names import is_framework
from nxdpp.tracing.graph.checks import mask_with_items, value_or_none
from nxdpp.tracing.graph.errors import TRACING
from nxdpp.tracing.graph.modes import applied, current_modes
from nxdpp.tracing.modules import listings
from nxdpp.tracing.sizes.input_specs import InputSpec, length_of, spec_of
from nxdpp.tracing.sizes.sizes import UnknownSizeError, number_of_items
from nxdpp.tracing.values.in_place import IN_PLACE_OPERATORS, assignment, in_place, in_place_method
from nxdpp.tracing.values.items_of_dicts import ITEMS, METHODS, items_of, known_items
from nxdpp.tracing.values.metadata import has_name, is_metadata, is_shape
from nxdpp.tracing.values.number_proxy import NumberProxy
from nxdpp.tracing.values.type_answers import class_of, is_field, may_be_field, reads_parameter

_logger = logging.getLogger(__name__)

# C code behind torch.autograd and torch.func takes an object of class Tensor for one, and crashes on a proxy.
_TRACING_CODE = re.compile(
    rf"{re.escape(os.path.dirname(os.path.dirname(TRACING)))}/(nxdpp/)?(agreement|pipeline|planning|tracing)/"
    r"|/torch/(fx|utils|autograd|_functorch)/|/torch/nn/modules/module\.py$"
)
# Code that asks on behalf of its caller.
_ON_BEHALF = re.compile(r"^<frozen|/(abc|copy|dataclasses|functools|inspect|typing|torch/nn/parameter)\.py$")
# Attributes of a traced value that its spec has, with their names there.
_KNOWN = {"ndim": "dimensions", "dtype": "dtype"}
_OF_PROXIES = frozenset({"node", "tracer", ITEMS})
# Attributes of a tensor that may be None, and tell how it was made or what a backward has left.
_OF_AUTOGRAD = frozenset({BASE.name, "grad", "grad_fn"})


class _SizedProxy(NumberProxy):
    """A traced value that gives its length and its items where they follow from specs or sizes of the inputs."""

    @property  # type: ignore[misc]  # object has no property of this name
    def __class__(self) -> type:
        """The class for ``isinstance`` in all code, also in torch and in helper modules; a proxy's own for fx.

        The parser of torch's arguments takes an object of class Tensor for one, and crashes on a proxy:
        ``torch.where(mask, x, 0)``.
        """
        asker = caller()
        asks_torch = not _ON_BEHALF.search(file_of(asker)) and calls_c_code(asker)
        return type(self) if _is_tracing_code(asker) or asks_torch else class_of(self)

    def __len__(self) -> int:
        size = _length(self)
        return super().__len__() if size is None else size

    def __iter__(self) -> Iterator[Any]:
        size = _length_for_unpacking(self, caller())
        if size is None:
            items = items_of(self)
            return super().__iter__() if items is None else iter(items)
        return (operator.getitem(self, i) for i in range(size))


class RecordingProxy(_SizedProxy):
    """A traced value.

    An in-place change (``x[i] = y``, ``x.masked_fill_()``) rebinds the proxy to the changed value. The graph then
    has reads and writes in their order, and dead-code elimination keeps the writes.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "requires_grad":
            self.requires_grad_(value)
        elif hasattr(torch.Tensor, name) and not isinstance(value, property):
            raise _tracer(self).refused(
                f"forward sets {self.node.name}.{name}, which changes a tensor outside the transformer layers "
                f"under all its names. Make a new tensor, or change this one with a method (x.copy_(y))."
            )
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        known = _KNOWN.get(name)
        if known is not None and (fact := getattr(_spec(self), known)) is not None:
            return fact
        if name == "device" and _tracer(self).first_input is not None and reads_parameter(self):
            return _tracer(self).first_input.device  # the parameter may be on the meta device here
        if name.endswith("_") and not name.endswith("__"):
            return in_place_method(self, name)
        if name.startswith("_") and file_of(caller()).endswith("/torch/nn/parameter.py"):
            # ``isinstance(x, nn.Parameter)``, after it has asked for the class.
            raise AttributeError(name)
        if not has_name(self.node, name):
            raise AttributeError(name)
        if name == "register_hook":
            raise _tracer(self).refused(
                f"forward registers a hook on {self.node.name} outside the transformer layers, which no step would "
                f"repeat. Register it in a module of its own, which takes the value and returns it."
            )
        if name in _OF_AUTOGRAD:
            raise _tracer(self).refused(
                f"forward reads {self.node.name}.{name} outside the transformer layers; it is another one in each "
                f"step, or on each stage. Read it outside the model."
            )
        if not hasattr(torch.Tensor, name) and not is_metadata(self.node) and self._is_tensor():
            raise AttributeError(f"a tensor between layers has no attribute {name}")
        if is_field(self.node, name) or self._has_field(name, caller()):
            return value_or_none(self.tracer.create_proxy("call_function", getattr, (self, name), {}))
        return RecordingShape(self, name) if name == "shape" else RecordingAttribute(self, name)

    def _has_field(self, name: str, asker: Frame) -> bool:
        is_asked = may_be_field(self.node, name, asker) and not _is_tracing_code(asker)
        return is_asked and not self._is_tensor()

    def _is_tensor(self) -> bool:
        """Return whether the value is a tensor for inputs of the sizes at hand, which is then a fact of the graph."""
        return not _tracer(self).finished and _tracer(self).is_tensor(self.node)

    def keys(self) -> Any:
        """The keys of a dict, also for ``{**x}``."""
        items = items_of(self)
        return super().keys() if items is None else items.keys()

    def __getitem__(self, index: Any) -> fx.Proxy | None:
        if isinstance(index, str | int) and (items := known_items(self)) is not None and index in items:
            known: fx.Proxy | None = items[index]
            return known
        item = (mask_with_items(self), index)
        return value_or_none(self.tracer.create_proxy("call_function", operator.getitem, item, {}))

    def __setitem__(self, index: Any, item: Any) -> None:
        assign = assignment(self.node, item)
        self.node = self.tracer.create_proxy("call_function", assign, (self, index, item), {}).node


class RecordingAttribute(fx.proxy.Attribute, _SizedProxy):
    """An attribute or a method of a traced value. A known shape can be unpacked.

    Its node is made at its first use, in the modes of torch in which the code asked for the attribute.
    """

    def __init__(self, root: fx.Proxy, attr: str) -> None:
        super().__init__(root, attr)
        self._modes = current_modes()

    def __getattr__(self, name: str) -> Any:
        if not has_name(self.node, name):
            raise AttributeError(name)
        if name == "type" and self.attr == "device":
            # torch.autocast takes no traced text.
            return _device_type(self)
        return super().__getattr__(name)

    @property
    def node(self) -> fx.Node:
        """The node of the attribute."""
        if self._node is None:
            with applied(self._modes):
                self._node = super().node
        return self._node

    @node.setter
    def node(self, node: fx.Node) -> None:
        self._node = node

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Record a method call, unless the spec has its answer."""
        dimensions = _spec(self.root).dimensions
        if self.attr in ("dim", "ndimension") and dimensions is not None:
            return dimensions
        if self.attr in METHODS and not args and (items := items_of(self.root)) is not None:
            return getattr(items, self.attr)()
        called = super().__call__(*args, **kwargs)
        return value_or_none(called) if self.attr == "get" else called


for _function in IN_PLACE_OPERATORS:
    for _class in (RecordingProxy, RecordingAttribute):
        setattr(_class, f"__{_function.__name__.strip('_')}__", in_place(_function))


class RecordingShape(RecordingAttribute):
    """``x.shape``, a sequence for ``match``."""


class RecordingSize(RecordingProxy):
    """``x.size()``, a sequence for ``match``."""


Sequence.register(RecordingShape)
Sequence.register(RecordingSize)


def proxy_of(node: fx.Node, tracer: Any) -> RecordingProxy:
    """The proxy of a node."""
    return (RecordingSize if is_shape(node) else RecordingProxy)(node, tracer)


def refuse_attributes_of_output(model: nn.Module, values: Iterable[Any]) -> None:
    """Raise ``RuntimeError`` for an attribute that the spine has set on a value of the output of ``model``.

    Outputs of transformers' models hold such values next to the loss (SmolVLM's features of images). There it is a
    warning.
    """
    name, values = type(model).__name__, list(values)
    for value in values:
        attributes = sorted(vars(value).keys() - _OF_PROXIES) if issubclass(type(value), RecordingProxy) else []
        if not attributes:
            continue
        message = (
            f"{name}.forward sets {value.node.name}.{attributes[0]} on a value that a module returned, and returns it; "
            f"a graph would lose the attribute."
        )
        may_be_loss = len(values) == 1 or "loss" in attributes
        if may_be_loss or not is_framework(type(model).__module__):
            raise RuntimeError(f"{message} Return a new object with all of its fields.")
        _logger.warning("%s The loss does not change. In an evaluation without labels the value lacks it.", message)


def refuse_attributes(module: nn.Module, arguments: Any) -> None:
    """Raise ``RuntimeError`` for an attribute that the spine has set on a value among ``arguments`` of ``module``.

    Code of the user in ``module`` would get the value without it.
    """
    name = type(module).__name__
    for leaf in pytree.tree_leaves(arguments):
        # A traced value would look through the stack for the answer to isinstance.
        if issubclass(type(leaf), RecordingProxy):
            names = sorted(vars(leaf).keys() - _OF_PROXIES)
            classes = {type(part) for part in listings.modules(module)} if names else set()
            if any(not is_framework(cls.__module__) for cls in classes):
                raise RuntimeError(
                    f"forward sets {leaf.node.name}.{names[0]}, and gives the value to {name}, which would get it "
                    f"without the attribute. Give {names[0]} to {name} as an argument."
                )


def _is_tracing_code(frame: Frame) -> bool:
    asker = next((outer for outer in outwards(frame) if not _ON_BEHALF.search(file_of(outer))), None)
    return asker is not None and _TRACING_CODE.search(file_of(asker)) is not None


def _spec(proxy: fx.Proxy) -> InputSpec:
    return spec_of(proxy.node, _tracer(proxy).root)


def _tracer(proxy: fx.Proxy) -> Any:
    # SpineTracer, which imports this module.
    return proxy.tracer


def _length(proxy: fx.Proxy) -> int | None:
    known = length_of(proxy.node, _tracer(proxy).root)
    return _fact(proxy, len) if known is None else known


def _length_for_unpacking(proxy: fx.Proxy, asker: Frame) -> int | None:
    known = length_of(proxy.node, _tracer(proxy).root)
    if known is not None:
        return known
    targets = unpacked_length(asker)
    return targets if targets is not None else _fact(proxy, number_of_items)


def _device_type(device: fx.Proxy) -> Any:
    question = device.tracer.create_proxy("call_function", getattr, (device, "type"), {})
    try:
        return _tracer(device).fact(question.node, str)
    except UnknownSizeError:
        return question


def _fact(proxy: fx.Proxy, read: Callable[[Any], int]) -> int | None:
    try:
        return int(_tracer(proxy).fact(proxy.node, read))
    except UnknownSizeError:
        return None

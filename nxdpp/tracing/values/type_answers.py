"""Types of traced values for code that asks: ``isinstance(x, c)``, ``type(x)``, ``callable(x)``; fields of outputs.

A type that is not sure is checked in every step (``tracing/graph/checks.py``). A field is an attribute of an object
that a module returns: ``output.mask``, and one with a name that tensors have (``output.mean``).
"""

import builtins
import operator
from typing import Any, get_origin

import torch
from torch import fx, nn

from nxdpp.ground.torch_names import PARAMETERS
from nxdpp.tracing.code.frames import Frame, calls_attribute
from nxdpp.tracing.graph.calls import OpaqueCall, record_opaque_call
from nxdpp.tracing.graph.checks import expect_type, is_user_function, passes_on, return_annotation, run_in_every_step
from nxdpp.tracing.graph.uses import is_from_torch
from nxdpp.tracing.modules.listings import submodule, unwrapped
from nxdpp.tracing.sizes.input_specs import UNKNOWN
from nxdpp.tracing.sizes.sizes import UnknownSizeError
from nxdpp.tracing.values.metadata import is_metadata, is_shape

# Modules of torch whose output may be a tuple.
_WITH_ANY_OUTPUT = (nn.Identity, nn.MultiheadAttention, nn.RNNBase, nn.Sequential)


def traced_isinstance(value: Any, classes: Any) -> bool:
    """``isinstance`` for traced code: a proxy is a tensor, unless its node says otherwise."""
    if not builtins.isinstance(value, fx.Proxy):
        return builtins.isinstance(value, classes)
    if value.node.op != "placeholder" and is_metadata(value.node):
        return issubclass(_type_of_metadata(value), classes)
    answer = issubclass(_type_of(value), classes)
    if value.node.op != "placeholder":
        value.node = record_opaque_call(expect_type, (value, classes, answer), {}).node
        run_in_every_step(value.node)
    return answer


class _AnyType(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and builtins.isinstance(args[0], fx.Proxy):
            return class_of(args[0])
        return builtins.type(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return builtins.isinstance(instance, builtins.type)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is builtins.type

    def __hash__(cls) -> int:
        return hash(builtins.type)


class TracedType(builtins.type, metaclass=_AnyType):
    """``type`` for traced code: a traced value has the type of the value."""


def traced_callable(value: Any) -> bool:
    """``callable`` for traced code: a traced value is not callable."""
    return not builtins.isinstance(value, fx.Proxy) and callable(value)


def class_of(value: fx.Proxy) -> type:
    """The class that ``isinstance`` sees in code whose ``isinstance`` is Python's own: torch and helper modules.

    The graph checks in every step that the value is of this type, where it may be of another.
    """
    tracer: Any = value.tracer
    if tracer.finished:
        return torch.Tensor
    node = value.node
    if node.op != "placeholder" and is_metadata(node):
        return _type_of_metadata(value)
    found = _type_of(value)
    is_sure = node.op in ("placeholder", "get_attr") or passes_on(node)
    if not is_sure and (node.op != "call_module" or _source(node, tracer.root) is not None):
        value.node = record_opaque_call(expect_type, (value, found, True), {}).node
    return found


def _type_of_metadata(value: fx.Proxy) -> type:
    tracer: Any = value.tracer
    if is_shape(value.node):
        return torch.Size
    try:
        found: type = tracer.fact(value.node, type)
    except UnknownSizeError as error:
        raise tracer.refused(
            TypeError(f"the type of {value.node.name} is asked, which is unknown ({error})")
        ) from error
    return found


def reads_parameter(value: fx.Proxy) -> bool:
    """Return whether ``value`` is a parameter of the model."""
    if value.node.op != "get_attr":
        return False
    tracer: Any = value.tracer
    owner, _, name = str(value.node.target).rpartition(".")
    return name in PARAMETERS.of(tracer.root.get_submodule(owner))


def _type_of(value: fx.Proxy) -> type:
    node = value.node
    if reads_parameter(value):
        return nn.Parameter
    if builtins.isinstance(node.target, OpaqueCall) and node.target.declares_dict:
        return dict
    tracer: Any = value.tracer
    if (module := _source(node, tracer.root)) is not None:
        return _type_of_output(value, module)
    return node.meta.get("spec", UNKNOWN).number or torch.Tensor


def _source(node: fx.Node, root: nn.Module) -> nn.Module | None:
    """Return the module whose output, or an item or a field of it, ``node`` is; ``None`` if it gives only tensors."""
    node = _whole(node)
    if node.op != "call_module":
        return None
    module = unwrapped(submodule(root, str(node.target)))
    gives_tensors = is_from_torch(module) and not builtins.isinstance(module, _WITH_ANY_OUTPUT)
    return None if gives_tensors else module


def _whole(node: fx.Node) -> fx.Node:
    """The node of which ``node`` is an item or a field, or ``node`` itself."""
    while passes_on(node) or node.target in (operator.getitem, getattr):
        if not builtins.isinstance(node.args[0], fx.Node):
            break
        node = node.args[0]
    return node


def _is_whole(node: fx.Node) -> bool:
    while passes_on(node) and builtins.isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node.op == "call_module"


def _type_of_output(value: fx.Proxy, module: nn.Module) -> type:
    """The type of what ``module`` returns, or of a part of it: of its annotation, or of a run on fake tensors."""
    tracer: Any = value.tracer
    declared = return_annotation(module) if _is_whole(value.node) else Any
    is_tensor = builtins.isinstance(declared, type) and issubclass(declared, torch.Tensor)
    if is_tensor and type(module).__module__.startswith("transformers."):
        # A run costs time, and every step checks the type.
        return torch.Tensor
    try:
        found: type = tracer.read(value.node, type)
        if issubclass(found, torch.Tensor):
            return torch.Tensor
        tracer.fact(value.node, type)
    except UnknownSizeError:
        origin = get_origin(declared)
        return origin if origin in (tuple, list) else torch.Tensor
    return found


# Methods of outputs that are mappings.
_METHODS_OF_MAPPINGS = frozenset({"get", "items", "keys", "pop", "to_tuple", "values"})
# Attributes of tensors that are not methods, and that an object may have as a field.
_NAMES = frozenset({"H", "T", "data", "imag", "layout", "mH", "mT", "name", "names", "real", "volatile"})


def is_field(node: fx.Node, name: str) -> bool:
    """Return whether ``name`` is a field of an object that a module or a function returns: no tensor has it."""
    return not hasattr(torch.Tensor, name) and name not in _METHODS_OF_MAPPINGS and _is_part_of_output(node)


def may_be_field(node: fx.Node, name: str, asker: Frame) -> bool:
    """Return whether ``name``, which tensors have, may be a field here: ``asker`` does not call it as a method."""
    if name.startswith("_") or not _is_part_of_output(node):
        return False
    if name in _NAMES:
        return True
    return callable(getattr(torch.Tensor, name, None)) and not calls_attribute(asker)


def _is_part_of_output(node: fx.Node) -> bool:
    """Return whether ``node`` is what a module or a function of the user returns, or a part of it."""
    node = _whole(node)
    return node.op == "call_module" or is_user_function(node)

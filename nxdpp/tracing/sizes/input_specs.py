"""Number of dimensions and dtype of a traced value, as far as they follow from the specs of the inputs.

Models ask for them in their control flow (``if mask.ndim == 4``), unpack shapes (``x.view(*y.shape)``) and take
their length. The answers hold for all inputs of the same specs, and a trace belongs to these.
"""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from nxdpp.ground.torch_names import BUFFERS, PARAMETERS
from nxdpp.tracing.values.metadata import is_shape, reads


class InputSpec(NamedTuple):
    """Number of dimensions and dtype of an input. Another spec needs another trace.

    A number or a list has no dimensions and no dtype; its type is ``number``.
    """

    dimensions: int | None
    dtype: torch.dtype | None
    number: type | None = None


UNKNOWN = InputSpec(None, None)
_SAME_METHODS = frozenset(
    {"add", "clamp", "clone", "contiguous", "cumsum", "detach", "div", "eq", "float", "ge", "gt", "int", "le", "long",
     "lt", "masked_fill", "mul", "ne", "sub", "to", "transpose", "type", "type_as"}
)  # fmt: skip
COMPARISONS = frozenset({operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge})
_POINTWISE = COMPARISONS | {
    torch.where, torch.logical_and, torch.logical_or, torch.logical_not, operator.add, operator.sub, operator.mul,
    operator.truediv, operator.floordiv, operator.and_, operator.or_,
}  # fmt: skip
# Methods of a tensor that keep its dtype, also under autocast.
_SAME_DTYPE = frozenset(
    {"clone", "contiguous", "cpu", "cuda", "detach", "expand", "expand_as", "flatten", "movedim", "narrow", "permute",
     "repeat", "reshape", "select", "squeeze", "t", "transpose", "unsqueeze"}
)  # fmt: skip
_DTYPES = {
    "bool": torch.bool, "bfloat16": torch.bfloat16, "double": torch.float64, "float": torch.float32,
    "half": torch.float16, "int": torch.int32, "long": torch.int64,
}  # fmt: skip
_SAME_MODULES = (nn.Linear, nn.LayerNorm, nn.Dropout, nn.Identity)


def spec_of(node: fx.Node, root: nn.Module) -> InputSpec:
    """The known spec of a value of the graph. ``root`` has the modules and parameters."""
    if "spec" not in node.meta:
        node.meta["spec"] = _infer(node, root)
    spec: InputSpec = node.meta["spec"]
    return spec


def length_of(node: fx.Node, root: nn.Module) -> int | None:
    """The length of a value that is a shape."""
    if is_shape(node):
        return _dimensions(node.args[0], root)
    if node.op == "call_function" and node.target is operator.getitem and isinstance(node.args[1], slice):
        return _length_of_slice(node.args[0], node.args[1], root)
    if node.op == "call_function" and node.target is operator.add:
        parts = [_length(argument, root) for argument in node.args]
        return None if None in parts else sum(part for part in parts if part is not None)
    return None


def constant_of(value: Any, root: nn.Module) -> Any:
    """The value of a node that is a size in the code or a comparison of sizes, else ``None``."""
    if not isinstance(value, fx.Node):
        return value
    if value.op != "call_function":
        return None
    if value.target is operator.getitem:
        return _written_size(value.args[0], value.args[1], root)
    if value.target in COMPARISONS:
        sides = [constant_of(argument, root) for argument in value.args]
        return None if None in sides else value.target(*sides)
    return None


def _written_size(shape: Any, index: Any, root: nn.Module) -> int | None:
    owner = shape.args[0] if reads(shape, ("shape",)) else None
    if not isinstance(owner, fx.Node) or owner.op != "call_method" or not isinstance(index, int):
        return None
    if owner.target not in ("expand", "view", "reshape"):
        return None
    sizes = owner.args[1] if isinstance(owner.args[1], tuple | list) else owner.args[1:]
    size = sizes[index] if -len(sizes) <= index < len(sizes) else None
    return size if isinstance(size, int) and size >= 0 else None


def _length(value: Any, root: nn.Module) -> int | None:
    if isinstance(value, fx.Node):
        return length_of(value, root)
    return len(value) if isinstance(value, tuple | list) else None


def _infer(node: fx.Node, root: nn.Module) -> InputSpec:
    if node.op == "get_attr":
        owner, _, name = str(node.target).rpartition(".")
        module = root.get_submodule(owner)
        # getattr would return a traced value while a model is traced.
        tensor = PARAMETERS.of(module).get(name, BUFFERS.of(module).get(name))
        # A traced value that forward has set is refused later.
        return InputSpec(tensor.ndim, tensor.dtype) if isinstance(tensor, torch.Tensor) else UNKNOWN
    if node.op == "call_module":
        return _of_module(node, root)
    if node.op == "call_method":
        return InputSpec(_of_method(node, root), _dtype_of_method(node, root))
    if node.op == "call_function":
        is_item = node.target is operator.getitem and isinstance(node.args[0], fx.Node)
        return InputSpec(_of_function(node, root), _dtype(node.args[0], root) if is_item else None)
    return UNKNOWN


def _of_module(node: fx.Node, root: nn.Module) -> InputSpec:
    module = root.get_submodule(str(node.target))
    inputs = list(node.args) + list(node.kwargs.values())
    dimensions = _dimensions(inputs[0], root) if inputs else None
    if dimensions is None:
        return UNKNOWN
    if isinstance(module, nn.Embedding):
        return InputSpec(dimensions + 1, None)
    is_norm = type(module).__name__.endswith("RMSNorm")
    return InputSpec(dimensions, None) if is_norm or isinstance(module, _SAME_MODULES) else UNKNOWN


def _of_method(node: fx.Node, root: nn.Module) -> int | None:
    own = _dimensions(node.args[0], root)
    name = str(node.target)
    if name in ("view", "reshape", "expand", "permute", "repeat"):
        return _count(node.args[1:], root)
    if own is None:
        return None
    if name == "unsqueeze":
        return own + 1
    return own if name.rstrip("_") in _SAME_METHODS else None


def _dtype_of_method(node: fx.Node, root: nn.Module) -> torch.dtype | None:
    own, name = _dtype(node.args[0], root), str(node.target)
    if name in _DTYPES:
        return _DTYPES[name]
    if name in ("view", "to"):
        changes = [*node.args[1:], *node.kwargs.values()]
        is_kept = all(isinstance(value, int | torch.device) or _is_device_or_size(value) for value in changes)
        dtypes = [value for value in changes if isinstance(value, torch.dtype)]
        return own if is_kept else next(iter(dtypes), None)
    return own if name in _SAME_DTYPE else None


def _is_device_or_size(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(isinstance(part, int) or _is_device_or_size(part) for part in value)
    if not isinstance(value, fx.Node):
        return False
    if value.op == "call_function" and value.target is operator.getitem:
        return _is_device_or_size(value.args[0])
    asks = value.args[1] if value.op == "call_function" and value.target is getattr else value.target
    return asks in ("device", "shape", "size") and value.op in ("call_function", "call_method")


def _dtype(value: Any, root: nn.Module) -> torch.dtype | None:
    return spec_of(value, root).dtype if isinstance(value, fx.Node) else None


def _of_function(node: fx.Node, root: nn.Module) -> int | None:
    target: Any = node.target
    if target is torch.arange:
        return 1
    if target in (torch.ones, torch.zeros, torch.empty):
        return _count(node.args, root)
    if target is torch.full:
        return _count(node.args[:1], root)
    if target in _POINTWISE:
        known = [_dimensions(argument, root) for argument in node.args]
        sizes = [size for size in known if size is not None]
        return max(sizes) if len(sizes) == len(known) else None
    if target is operator.getitem:
        return _of_item(node, root)
    return None


def _of_item(node: fx.Node, root: nn.Module) -> int | None:
    own = _dimensions(node.args[0], root)
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    if own is None or not all(isinstance(part, int | slice | None | type(...)) for part in index):
        return None
    return own + sum(part is None for part in index) - sum(isinstance(part, int) for part in index)


def _count(sizes: Sequence[Any], root: nn.Module) -> int | None:
    """The number of dimensions of ``sizes``, given one by one or in one tuple or shape."""
    if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
        return len(sizes[0])
    if len(sizes) == 1 and isinstance(sizes[0], fx.Node):
        return length_of(sizes[0], root)
    return len(sizes) or None


def _dimensions(value: Any, root: nn.Module) -> int | None:
    if isinstance(value, fx.Node):
        return spec_of(value, root).dimensions
    return 0 if isinstance(value, int | float) else None


def _length_of_slice(shape: Any, part: slice, root: nn.Module) -> int | None:
    whole = length_of(shape, root) if isinstance(shape, fx.Node) else None
    bounds = (part.start, part.stop, part.step)
    if whole is None or not all(bound is None or isinstance(bound, int) for bound in bounds):
        return None
    return len(range(whole)[part])

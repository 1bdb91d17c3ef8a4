"""Functions of einops, of ``dataclasses``, and of ``nn.TransformerEncoder`` and its kin that the spine calls.

Each rearrangement of einops is one node. Nothing here imports einops.

In evaluation without gradients, an encoder of torch with a padding mask runs its layers on nested tensors. These do not
cross stage boundaries. Each layer then packs its input and pads its output, which keeps every value.

A run on fake tensors gives the class of a dataclass that a module returned. It answers ``fields(out)`` and
``is_dataclass(out)``, and ``replace(out, hidden=h)`` makes an object of it. ``asdict`` and ``astuple`` are nodes.
"""

import dataclasses
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn
from torch.nn.modules import transformer

from nxdpp.ground.other_names import APPLY_RECIPE, TORCH_BACKEND
from nxdpp.ground.torch_names import CAUSAL_MASK
from nxdpp.tracing.graph.calls import OpaqueCall, has_proxy, record_opaque_call, recorded
from nxdpp.tracing.graph.swap import replaced, swapped
from nxdpp.tracing.modules import listings
from nxdpp.tracing.values.type_answers import class_of

_MODULE = "einops.einops"
_PACKING = "einops.packing"


@contextmanager
def recorded_einops() -> Iterator[None]:
    """Record ``rearrange``, ``reduce`` and ``repeat`` of traced values, under any name of the functions.

    ``einsum``, ``pack``, ``unpack`` and ``parse_shape`` are traced through: they call torch.
    """
    if _MODULE not in sys.modules:
        yield
        return
    functions, packing = vars(sys.modules[_MODULE]), vars(sys.modules[_PACKING])
    get_backend = functions["get_backend"]

    def backend_of(tensor: Any) -> Any:
        if not isinstance(tensor, fx.Proxy):
            return get_backend(tensor)
        assert APPLY_RECIPE.found is not None
        return TORCH_BACKEND()

    def apply(backend: Any, recipe: Any, tensor: Any, reduction_type: Any, axes_lengths: Any) -> Any:
        if has_proxy((tensor, axes_lengths), {}):
            return record_opaque_call(rearrange, (tensor, recipe, reduction_type, axes_lengths), {})
        return APPLY_RECIPE(backend, recipe, tensor, reduction_type, axes_lengths)

    changes = {"get_backend": backend_of, **({APPLY_RECIPE.name: apply} if APPLY_RECIPE.exists else {})}
    with swapped(functions, changes), swapped(packing, {"get_backend": backend_of}):
        yield


def rearrange(tensor: Any, recipe: Any, reduction: Any, axes_lengths: Any) -> Any:
    """``tensor`` after a rearrangement of einops, which has parsed it to a recipe."""
    functions = vars(sys.modules[_MODULE])
    backend = functions["get_backend"](tensor)
    return functions[APPLY_RECIPE.name](backend, recipe, tensor, reduction, axes_lengths)


_encode = nn.TransformerEncoder.forward


@contextmanager
def recorded_transformers() -> Iterator[None]:
    """Record the comparison of a mask with the causal one, and the packing of padded sequences."""
    # Without the name torch's own code asks data of the mask, which the trace refuses.
    detect: Any = CAUSAL_MASK.found if CAUSAL_MASK.exists else None

    def is_causal_mask(mask: Any, is_causal: bool | None = None, size: Any = None) -> Any:
        if isinstance(mask, fx.Proxy) and is_causal is None:
            return record_opaque_call(detect, (mask, is_causal, size), {})
        return detect(mask, is_causal, size)

    masks = swapped(vars(transformer), {} if detect is None else {detect.__name__: is_causal_mask})
    with masks, patch.object(nn.TransformerEncoder, "forward", _traced_encode):
        yield


def _traced_encode(
    self: nn.TransformerEncoder,
    src: Any,
    mask: Any = None,
    src_key_padding_mask: Any = None,
    is_causal: bool | None = None,
) -> Any:
    nests = getattr(self, "use_nested_tensor", False)
    if nests and isinstance(src_key_padding_mask, fx.Proxy) and mask is None and not self.layers[0].training:
        return _encode_packed(self, src, src_key_padding_mask, is_causal is True)
    # A proxy never passes the conditions for nested tensors, but the code asks data before it finds that out.
    with swapped(vars(self), {"use_nested_tensor": False}):
        return _encode(self, src, mask, src_key_padding_mask, is_causal)


def _encode_packed(self: nn.TransformerEncoder, src: Any, mask: Any, is_causal: bool) -> Any:
    trains = any(parameter.requires_grad for parameter in listings.parameters(self.layers[0]))
    output = src
    for layer in self.layers:
        how = (output, mask, trains, getattr(self, "mask_check", True))
        packed, layer_mask = (record_opaque_call(f, how, {}) for f in (packed_if_nested, mask_unless_nested))
        result = layer(packed, src_mask=None, is_causal=is_causal, src_key_padding_mask=layer_mask)
        output = record_opaque_call(padded_like, (result, output), {})
    return output if self.norm is None else self.norm(output)


def pads_a_result(node: fx.Node) -> bool:
    """Return whether ``node`` pads the output of a layer, and so stays on its stage."""
    return isinstance(node.target, OpaqueCall) and node.target.function is padded_like


def packed_if_nested(x: torch.Tensor, mask: torch.Tensor, trains: bool, checks_mask: bool) -> torch.Tensor:
    """``x`` (B, T, C) without its padding, as a nested tensor, where the encoder of torch would make one."""
    if not _is_nested(x, mask, trains, checks_mask):
        return x
    lengths = mask.logical_not().sum(1).tolist()
    return torch.nested.as_nested_tensor([row[:length] for row, length in zip(x, lengths, strict=True)])


def mask_unless_nested(x: torch.Tensor, mask: torch.Tensor, trains: bool, checks_mask: bool) -> torch.Tensor | None:
    """``mask``, to add to scores, where ``packed_if_nested`` leaves ``x`` as it is."""
    if _is_nested(x, mask, trains, checks_mask):
        return None
    return torch.zeros_like(mask, dtype=x.dtype).masked_fill(mask, -torch.inf) if mask.dtype is torch.bool else mask


def padded_like(output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``output`` with zeros as padding, in the shape of ``x``, if it is nested."""
    return output.to_padded_tensor(0.0, x.size()) if output.is_nested else output


def _is_nested(x: torch.Tensor, mask: torch.Tensor, trains: bool, checks_mask: bool) -> bool:
    if not torch.backends.mha.get_fastpath_enabled() or torch.is_autocast_enabled() or x.ndim != 3:
        return False
    if torch.is_grad_enabled() and (trains or x.requires_grad):
        return False
    keeps = mask.logical_not()
    return not checks_mask or torch.equal(keeps, keeps.sort(1, descending=True).values)


_FUNCTIONS: tuple[Any, ...] = (
    dataclasses.replace, dataclasses.asdict, dataclasses.astuple, dataclasses.fields, dataclasses.is_dataclass,
)  # fmt: skip


def recorded_dataclasses(sources: Iterable[ModuleType]) -> AbstractContextManager[None]:
    """Follow the functions of ``dataclasses`` in ``sources``, under any name.

    The module itself stays as it is: the tracer asks ``is_dataclass`` of each value.
    """
    replace, asdict, astuple, fields, is_dataclass = _FUNCTIONS
    changes: dict[int, Any] = {id(function): recorded(function) for function in (asdict, astuple)}

    def replace_fields(obj: Any, /, **values: Any) -> Any:
        if not issubclass(type(obj), fx.Proxy):
            return replace(obj, **values)
        cls = class_of(obj)
        others = [each.name for each in fields(cls) if each.init and each.name not in values]
        return cls(**{name: getattr(obj, name) for name in others}, **values)

    def fields_of(class_or_instance: Any) -> Any:
        value = class_or_instance
        return fields(class_of(value) if issubclass(type(value), fx.Proxy) else value)

    def is_one(obj: Any) -> Any:
        return is_dataclass(class_of(obj) if issubclass(type(obj), fx.Proxy) else obj)

    changes |= {id(replace): replace_fields, id(fields): fields_of, id(is_dataclass): is_one}
    module = ModuleType(dataclasses.__name__)
    own = vars(dataclasses)
    vars(module).update(own, **{name: changes[id(own[name])] for name in own if id(own[name]) in changes})
    return replaced(map(vars, sources), {**changes, id(dataclasses): module})

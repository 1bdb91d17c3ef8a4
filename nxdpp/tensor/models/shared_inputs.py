"""Column-parallel layers of one module that are given the same tensor: one message for its gradient.

The code of the module calls one layer after another. The first layer that is given a tensor makes the nodes of all of
them. The tensor keeps these for the others::

    query(x) ─┐
    key(x)   ─┼▶ one SharedInput of x ─▶ in the backward, one all-reduce for the gradient of x
    value(x) ─┘

A layer that is given a different tensor, or the same one again, begins a new ``SharedInput``.

``torch.compile`` cannot follow what a tensor keeps. In compiled code the siblings keep the tensor and what they compute
from it, and a hook of the compiled module forgets it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from nxdpp.ground.torch_names import FORWARD_HOOKS, VERSION
from nxdpp.tensor import mappings
from nxdpp.tensor.layers import column_parallel, whole_input
from nxdpp.tensor.models.modules import ColumnLinear
from nxdpp.tensor.overlapped_linear import SharedInput, WeightRows, autocast_dtype

_KEPT = "_nxdpp_shared_input"


def share_inputs(found: Mapping[str, nn.Module], names: Iterable[str]) -> None:
    """Let the column-parallel layers among ``names`` share their input if they have the same parent module."""
    children: dict[str, list[ColumnLinear]] = {}
    for name in names:
        layer = found[name]
        if isinstance(layer, ColumnLinear):
            children.setdefault(name.rpartition(".")[0], []).append(layer)
    for layers in children.values():
        if len(layers) > 1:
            siblings = Siblings(layers)
            for layer in layers:
                vars(layer)["siblings"] = siblings


@dataclass
class _Begun:
    """Nodes of one tensor, for the layers ``siblings``; the ones in ``waiting`` were not given the tensor yet.

    Layers may use them while the tensor has this ``state``. Where no layer is trained, ``entered`` is a copy of the
    tensor.
    """

    siblings: "Siblings"
    state: tuple[Any, ...]
    parts: list[WeightRows]
    waiting: list[ColumnLinear]
    entered: SharedInput | torch.Tensor


class _InGraph(NamedTuple):
    """Input of a layer in a compiled module, and the tensor of which its siblings compute their products."""

    input_: torch.Tensor
    mode: tuple[bool, torch.dtype | None]
    whole: torch.Tensor


def forget_after_calls(module: nn.Module) -> None:
    """Let layers in ``module``, which is to be compiled, keep no input after a call of it.

    A second call changes nothing.
    """
    if not any(isinstance(hook, _Forget) for hook in FORWARD_HOOKS.of(module).values()):
        kept = [vars(layer).get("siblings") for layer in module.modules()]
        if found := list(dict.fromkeys(each for each in kept if isinstance(each, Siblings))):
            module.register_forward_hook(_Forget(found))


class _Forget:
    """Hook of a module with layers that share inputs. Dynamo follows it in the code of the module."""

    def __init__(self, siblings: "list[Siblings]") -> None:
        self._siblings = siblings

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        for siblings in self._siblings:
            siblings.in_graph = ()


class Siblings:
    """Column-parallel layers of one module; ``in_graph`` is what they keep during a call of compiled code."""

    def __init__(self, layers: list[ColumnLinear]) -> None:
        self._layers = layers
        self.in_graph: tuple[_InGraph, ...] = ()

    def product(self, layer: ColumnLinear, input_: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the product of ``layer``, ``(..., O / ranks)``."""
        if torch.compiler.is_dynamo_compiling():
            return functional.linear(self._whole(input_), layer.weight, layer.bias)
        # A leaf that kept nodes of its own graph would never be freed. A copied layer has the siblings of the original.
        if not torch.is_grad_enabled() or input_.is_leaf or not input_.requires_grad or layer not in self._layers:
            return column_parallel(input_, [WeightRows(layer.weight, layer.bias)])[0]
        index = self._layers.index(layer)
        begun: _Begun | None = vars(input_).get(_KEPT)
        if begun is None or not self._fits(begun, index, input_):
            begun = vars(input_)[_KEPT] = self._begin(input_)
        begun.waiting.remove(layer)
        if not begun.waiting:
            del vars(input_)[_KEPT]
        if isinstance(begun.entered, SharedInput):
            return begun.entered.product(index)
        return functional.linear(begun.entered, layer.weight, layer.bias)

    def _whole(self, input_: torch.Tensor) -> torch.Tensor:
        mode = torch.is_grad_enabled(), autocast_dtype(input_)
        for kept in self.in_graph:
            if kept.input_ is input_ and kept.mode == mode:
                return kept.whole
        parts = [WeightRows(layer.weight, layer.bias) for layer in self._layers]
        whole = whole_input(input_, parts)
        self.in_graph += (_InGraph(input_, mode, whole),)
        return whole

    def _fits(self, begun: _Begun, index: int, input_: torch.Tensor) -> bool:
        layer = self._layers[index]
        return (
            begun.siblings is self
            and layer in begun.waiting
            and begun.state == _state(input_)
            and begun.parts[index].weight is layer.weight
            and begun.parts[index].bias is layer.bias
        )

    def _begin(self, input_: torch.Tensor) -> _Begun:
        parts = [WeightRows(layer.weight, layer.bias) for layer in self._layers]
        entered: SharedInput | torch.Tensor
        if any(part.weight.requires_grad for part in parts):
            entered = SharedInput(input_, parts)
        else:
            entered = mappings.copy_to_tensor_model_parallel_region(input_)
        return _Begun(self, _state(input_), parts, list(self._layers), entered)


def _state(tensor: torch.Tensor) -> tuple[Any, ...]:
    return VERSION.of(tensor), autocast_dtype(tensor)

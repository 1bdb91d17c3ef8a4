"""Tensors that a loss function reads besides its arguments: tensors that a step would not train are refused.

::

    loss_fn = lambda output, labels: F.cross_entropy(output / temperature, labels)

    output ◀── div ◀── cross_entropy ◀── loss       a walk back from the loss, up to the arguments
               │
    temperature ┘                                   a leaf: trained only if it is a parameter of this rank

A parameter of another rank is on the meta device here. A parameter of no model is not averaged over the replicas, and
no method lists it. A tensor that was taken from the model before the wrapping is not the one that is trained.
"""

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import get_gradient_edge

from nxdpp.tracing.graph.search import reached
from nxdpp.tracing.modules import listings
from nxdpp.tracing.values.nested import leaves_of

_META = re.compile(r"\bmeta\b", re.IGNORECASE)
_PLAIN = (torch.Tensor, int, float, complex, str, bytes, torch.dtype, torch.device)
_REMEDY = (
    "Make it a part of the model: return it from forward beside the output, or compute the loss in a module that holds "
    "both, and leave loss_fn out"
)


def nodes_of(arguments: Iterable[Any]) -> frozenset[Any] | None:
    """The nodes of the autograd graph that made the arguments of a call.

    ``None`` for arguments without values, and for objects that may hold more tensors.
    """
    leaves = leaves_of(list(arguments))
    if not all(leaf is None or isinstance(leaf, _PLAIN) for leaf in leaves):
        return None
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in tensors):
        return None
    # A change of a view in place makes new nodes up to its base.
    bases = [tensor._base for tensor in tensors if tensor._base is not None]
    return frozenset(get_gradient_edge(each).node for each in (*tensors, *bases) if each.requires_grad)


def verify_leaves(loss: Any, before: frozenset[Any], module: nn.Module) -> None:
    """Raise ``ValueError`` for a leaf that is no parameter of this rank, and for a loss without a value.

    Args:
        loss: made by a function whose arguments the nodes ``before`` made.
        before: these nodes.
        module: the whole model. Parameters of other ranks are on the meta device.
    """
    if not isinstance(loss, torch.Tensor):
        return
    for leaf in _leaves(loss, before):
        names = [name for name, parameter in listings.named_parameters(module) if parameter is leaf]
        if not names:
            raise ValueError(
                f"loss_fn reads a tensor {tuple(leaf.shape)} that requires a gradient, and it is neither an argument "
                f"nor a parameter of the stages here: no step would train it as one process does. {_REMEDY}; or detach "
                f"it."
            )
        if leaf.is_meta:
            raise ValueError(f"loss_fn reads {names[0]}, which another rank holds. {_REMEDY}.")
    if loss.is_meta:
        raise ValueError(f"loss_fn reads values of the model that another rank holds. {_REMEDY}.")


def explain(error: RuntimeError, module: nn.Module) -> None:
    """Raise ``ValueError`` for an ``error`` of a function that reads tensors of other ranks; otherwise return."""
    if _META.search(str(error)) and any(parameter.is_meta for parameter in listings.parameters(module)):
        raise ValueError(f"loss_fn reads values of the model that another rank holds. {_REMEDY}.") from error


def _leaves(loss: torch.Tensor, before: frozenset[Any]) -> list[torch.Tensor]:
    """Return the leaves from which ``loss`` is computed other than through the arguments of its function."""
    if not loss.requires_grad:
        return []

    def sources(node: Any) -> list[Any]:
        return [] if node in before else [source for source, _ in node.next_functions if source is not None]

    nodes: Iterable[Any] = reached([get_gradient_edge(loss).node], sources)
    return [n.variable for n in nodes if n not in before and type(n).__name__ == "AccumulateGrad"]

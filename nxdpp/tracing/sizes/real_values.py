"""Values that follow from sizes, computed with their elements: a mask, of which transformers asks its data.

::

    input_ids ── embed_tokens ── zeros of this shape ──┐
         └────── shape ── arange ── positions ─────────┴── create_causal_mask

Fake tensors have no elements, and for them transformers makes a mask that it leaves out in a step. An argument of which
only the metadata are used is a tensor of zeros, in the memory of one element.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from nxdpp.ground.torch_names import NO_DISPATCH_MODES, pytree
from nxdpp.tracing.graph.uses import metadata_arguments
from nxdpp.tracing.values.metadata import is_metadata


class DataError(Exception):
    """The value follows from data of the inputs, or from parameters."""


def computed(node: fx.Node, fakes: Mapping[fx.Node, Any], root: nn.Module) -> Any:
    """The value of ``node`` on the CPU; ``fakes`` has the fake value of each node that it follows from.

    Raises ``DataError`` unless it follows from sizes.
    """
    with NO_DISPATCH_MODES(), torch.no_grad():
        return _computed(node, fakes, root, {})


def _computed(node: fx.Node, fakes: Mapping[fx.Node, Any], root: nn.Module, known: dict[fx.Node, Any]) -> Any:
    if is_metadata(node):
        return fakes[node]
    if node in known:
        return known[node]
    if node.op not in ("call_function", "call_method"):
        raise DataError(f"it follows from {node.name}")
    stand_ins = metadata_arguments(node, root)

    def argument(other: fx.Node) -> Any:
        if other in stand_ins:
            return pytree.tree_map_only(torch.Tensor, _zeros, fakes[other])
        return _computed(other, fakes, root, known)

    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), argument)
    if node.op == "call_method":
        known[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
    else:
        assert callable(node.target)
        known[node] = node.target(*args, **kwargs)
    return known[node]


def _zeros(fake: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=fake.dtype).expand(fake.shape)

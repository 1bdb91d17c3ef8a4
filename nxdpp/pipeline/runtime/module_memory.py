"""Values in the memory of a module: a buffer that a layer returns, and changes for the next microbatch.

Such a value is copied before it is sent: the send may end after the change.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from nxdpp.devices.kinds import memory_of
from nxdpp.devices.strides import copied
from nxdpp.ground.torch_names import BUFFERS
from nxdpp.pipeline.p2p.layout import tensors_of
from nxdpp.tracing.modules import listings
from nxdpp.tracing.values.nested import map_leaves


def names_in_module_memory(names: Iterable[str], made: Mapping[str, Any], module: nn.Module) -> list[str]:
    """Return the ``names`` whose values in ``made`` have memory of buffers or attributes of modules in ``module``.

    Values with gradients are left out: autograd refuses a change of what a backward needs.
    """
    constants = {name: _memory(made[name]) for name in names}
    if not any(constants.values()):
        return []
    kept = {
        part
        for child in listings.modules(module)
        for part in _memory([*BUFFERS.of(child).values(), *vars(child).values()])
    }
    return [name for name, memory in constants.items() if memory & kept]


def copy_values(names: Collection[str], made: dict[str, Any]) -> None:
    """Replace the tensors without gradients of these values by copies."""
    for name in names:
        made[name] = map_leaves(lambda leaf: copied(leaf) if _is_constant(leaf) else leaf, made[name])


def _memory(value: Any) -> set[int]:
    """Addresses of the memory of tensors without gradients in ``value``, which is a value or a list of any objects."""
    values = [v for v in value if isinstance(v, torch.Tensor)] if isinstance(value, list) else tensors_of(value)
    constants = (tensor for tensor in values if _is_constant(tensor) and tensor.numel())
    return {memory_of(tensor) for tensor in constants}


def _is_constant(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.requires_grad and value.layout == torch.strided

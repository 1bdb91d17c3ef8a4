"""Activation checkpointing by OSLO's keys: only the inputs of layers are kept from the forward to the backward.

::

    enable                        input (B, T, H) kept on the device
    cpu_checkpointing             ... in host memory
    partitioned_checkpointing     ... a part (B, T, H / ranks) on each tensor-parallel rank
    contiguous_checkpointing      ... the memory of the parts of all layers is taken before the first layer runs
"""

import functools
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from nxdpp.doors.local_modules import LocalModules
from nxdpp.pipeline.activation_checkpoint import apply_checkpoint
from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults.waits import Wait


def layers_of(module: nn.Module) -> list[str]:
    """Return the names of the layers in ``module`` that are recomputed.

    They are the layers that transformers can checkpoint. A model without such layers (Albert) has its layers in the
    innermost ``ModuleList``.
    """
    named = dict(module.named_modules())
    names = [name for name, each in named.items() if isinstance(each, GradientCheckpointingLayer)]
    if names:
        return names
    lists = {name: each for name, each in named.items() if isinstance(each, nn.ModuleList)}
    outer = {name for name in lists for other in lists if other.startswith(f"{name}.")}
    return [f"{name}.{key}" for name in lists if name not in outer for key, _ in lists[name].named_children()]


def checkpoint_layers(module: nn.Module, names: list[str], to_cpu: bool, partitions: bool, contiguous: bool) -> None:
    """Recompute the forward of the layers of ``module`` during their backward.

    Args:
        module: the modules of this rank under their original names.
        names: of its layers.
        to_cpu: keep the inputs of layers in host memory.
        partitions: keep this rank's part of the hidden states, whose gather in the backward is collective over the
            tensor-parallel ranks.
        contiguous: take the memory of the parts of all layers of a list at once.
    """
    if names:
        apply_checkpoint(LocalModules(module, module, names))
    lists = Counter(name.rpartition(".")[0] for name in names)
    memories = {prefix: _PartMemory(count) if contiguous else None for prefix, count in lists.items()}
    for name in names:
        layer = module.get_submodule(name)
        keep = _KeepOptions(to_cpu, partitions, memories[name.rpartition(".")[0]])
        layer.forward = functools.partial(_without_cache, layer.forward, keep)


def _without_cache(forward: Callable[..., Any], keep: "_KeepOptions", /, *args: Any, **kwargs: Any) -> Any:
    """Run the checkpointed ``forward`` without a cache, which a recomputation would fill a second time."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    args = tuple(map(_no_cache, args))
    kwargs = {name: False if name == "use_cache" else _no_cache(value) for name, value in kwargs.items()}
    if not (keep.to_cpu or keep.partitions):
        return forward(*args, **kwargs)
    hidden = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
    with saved_tensors_hooks(functools.partial(_kept, hidden, keep), _restored):
        return forward(*args, **kwargs)


def _no_cache(value: Any) -> Any:
    if not isinstance(value, Cache):
        return value
    if value.get_seq_length() > 0:
        raise ValueError(
            "past_key_values holds keys and values of earlier tokens, which activation checkpointing cannot recompute: "
            "leave it out, or call the model under torch.no_grad()"
        )
    return None


class _PartMemory:
    """Memory for the parts of the hidden states of ``layers`` layers, taken together by the first of them.

    So it does not lie between temporary tensors of the layers, and the backward frees it layer by layer.
    """

    def __init__(self, layers: int) -> None:
        self._layers = self._left = layers
        self._free: dict[Hashable, list[torch.Tensor]] = {}

    def copy(self, part: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a copy of ``part`` on ``device``."""
        free = self._free.setdefault((part.shape, part.dtype, device), [])
        if not free:
            free += [part.new_empty(part.shape, device=device) for _ in range(self._left)]
        self._left -= 1
        if not self._left:
            # The next forward may have other shapes.
            self._free, self._left = {}, self._layers
        return free.pop().copy_(part)


class _KeepOptions(NamedTuple):
    """The settings of ``checkpoint_layers`` for a layer; ``memory`` is common to the layers of its list."""

    to_cpu: bool
    partitions: bool
    memory: _PartMemory | None


class _KeptTensor(NamedTuple):
    """A tensor from the forward to the backward.

    Attributes:
        values: all elements, or this rank's part of the last dimension.
        device: of the tensor in the forward.
        parts: number of parts of the last dimension.
    """

    values: torch.Tensor
    device: torch.device
    parts: int


def _kept(hidden: torch.Tensor | None, keep: _KeepOptions, tensor: torch.Tensor) -> _KeptTensor:
    """``tensor`` as it is kept. Only hidden states are equal on all tensor-parallel ranks."""
    size = parallel_state.get_tensor_model_parallel_size()
    device = torch.device("cpu") if keep.to_cpu else tensor.device
    is_hidden = hidden is not None and tensor.data_ptr() == hidden.data_ptr() and tensor.shape == hidden.shape
    if not (keep.partitions and is_hidden and tensor.shape[-1] % size == 0):
        return _KeptTensor(tensor.to(device), tensor.device, 1)
    part = tensor.detach().chunk(size, -1)[parallel_state.get_tensor_model_parallel_rank()]
    values = keep.memory.copy(part, device) if keep.memory else part.to(device, copy=True)
    return _KeptTensor(values, tensor.device, size)


def _restored(kept: _KeptTensor) -> torch.Tensor:
    values = kept.values.to(kept.device)
    if kept.parts == 1:
        return values
    parts = [torch.empty_like(values) for _ in range(kept.parts)]
    group = parallel_state.get_tensor_model_parallel_group()
    with Wait("kept activations", group):
        dist.all_gather(parts, values, group=group)
    return torch.cat(parts, -1)

"""Attributes of parameters under tensor parallelism, with the names of NeuronX Distributed.

Clipping and checkpoints read them::

    tensor_model_parallel      True: each tensor-parallel rank holds a part; False or missing: all hold the same
    partition_dim              dimension along which the whole tensor is divided, -1 if it is not
    partition_stride           number of blocks, each of which is divided: 3 for a fused query, key and value
    num_partitions             number of parts: the tensor-parallel size, or less where several ranks hold one part
    whole_size                 size along partition_dim of the whole, without padding (not in NeuronX Distributed)
    sequence_parallel_enabled  True: each tensor-parallel rank has the gradient of its part of the sequence
    expert_model_parallel      True: each rank of an expert group holds experts of its own, along dimension 0
    shared                     True: copy of a tied weight whose gradient another pipeline rank counts

Moves and materialisation keep the attributes of a parameter.
"""

import copy
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import nn

from nxdpp.gradients.average_checks import replica_step_check
from nxdpp.gradients.optimizer.partial_steps import refuse_partial_steps
from nxdpp.ground.torch_names import FORWARD_PRE_HOOKS, MOVE, PARAMETERS
from nxdpp.ranks import parallel_state

_OF_PARTS = ("tensor_model_parallel", "partition_dim", "partition_stride", "num_partitions")
_KEPT = (*_OF_PARTS, "whole_size", "sequence_parallel_enabled", "expert_model_parallel")


def set_tensor_model_parallel_attributes(
    tensor: torch.Tensor, is_parallel: bool, dim: int, stride: int = 1, num_partitions: int = 1
) -> None:
    """Mark ``tensor`` as a part of a whole that is divided along ``dim``, or as the whole."""
    if is_parallel:
        replica_step_check.begin()
        refuse_partial_steps()
    values = (is_parallel, dim, stride, num_partitions)
    for name, value in zip(_OF_PARTS, values, strict=True):
        setattr(tensor, name, value)


def copy_tensor_model_parallel_attributes(destination_tensor: torch.Tensor, source_tensor: torch.Tensor) -> None:
    """Give ``destination_tensor`` the attributes that ``source_tensor`` has."""
    for name in _KEPT:
        if hasattr(source_tensor, name):
            setattr(destination_tensor, name, getattr(source_tensor, name))


def is_tensor_parallel(tensor: torch.Tensor) -> bool:
    """Return whether each tensor-parallel rank holds a part of the tensor."""
    return bool(getattr(tensor, "tensor_model_parallel", False))


def whole_size(tensor: torch.Tensor) -> int:
    """Size of the whole of a divided ``tensor`` along ``partition_dim``, without padding."""
    attributes = vars(tensor)
    if "whole_size" in attributes:
        return int(attributes["whole_size"])
    size: int = tensor.shape[attributes["partition_dim"]] * attributes["num_partitions"]
    return size


def is_sequence_parallel(tensor: torch.Tensor) -> bool:
    """Return whether the gradient of ``tensor`` covers only this rank's part of the sequence."""
    return bool(getattr(tensor, "sequence_parallel_enabled", False))


def mark_sequence_parallel(module: nn.Module) -> None:
    """Mark the replicated parameters of ``module``, which is given a part of the sequence on each rank.

    Norms between sequence-parallel layers are such modules. A rank's gradient of their parameters covers its part of
    the sequence; ``sequence_parallel.allreduce_sequence_parallel_gradients`` adds them up. Copies of the module, and
    parameters that replace others, are marked at their next forward.
    """
    for each in module.modules():
        _mark_own(each)
        if PARAMETERS.of(each) and _mark_own not in FORWARD_PRE_HOOKS.of(each).values():
            each.register_forward_pre_hook(_mark_own)


def mark_again(module: nn.Module) -> None:
    """Mark the parameters of the modules in ``module`` that ``mark_sequence_parallel`` has seen."""
    for each in module.modules():
        if _mark_own in FORWARD_PRE_HOOKS.of(each).values():
            _mark_own(each)


def _mark_own(module: nn.Module, *_: Any) -> None:
    # torch.compile traces this method of torch, and no table of private names.
    for parameter in module.parameters(recurse=False):
        if not is_tensor_parallel(parameter):
            parameter.sequence_parallel_enabled = True  # type: ignore[attr-defined]  # nxdpp's own attribute of a tensor


def param_is_not_tensor_parallel_duplicate(param: torch.Tensor) -> bool:
    """Return whether this rank counts ``param`` in a sum over tensor-parallel ranks.

    A rank counts a part that only it holds. Of several ranks with one part, or with the whole, the first counts it.
    """
    return parallel_state.get_tensor_model_parallel_rank() % copies_of(param) == 0


def copies_of(param: torch.Tensor) -> int:
    """Number of neighbouring tensor-parallel ranks that hold the same part as this rank, or the same whole."""
    size = parallel_state.get_tensor_model_parallel_size()
    return size // int(getattr(param, "num_partitions", size)) if is_tensor_parallel(param) else size


class KeepsAttributes(nn.Module):
    """Module whose parameters keep their attributes where another parameter takes their place.

    torch replaces parameters in ``to("meta")``, ``copy.deepcopy`` and ``load_state_dict(assign=True)``. A parameter
    that is set has its own attributes, and the old one's other attributes if it has the same shape.
    """

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register ``param``, with the attributes of the parameter in whose place it comes."""
        old = self._parameters.get(name)
        super().register_parameter(name, param)
        if param is not None and old is not None and param.shape == old.shape:
            for key in _KEPT:
                if hasattr(old, key) and not hasattr(param, key):
                    setattr(param, key, getattr(old, key))

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        before = dict(self._parameters)
        MOVE.of(super())(fn, recurse)
        self._restore(before)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        # Its compiled code, which is the original's, is not in the state.
        vars(copied).update(copy.deepcopy(self.__getstate__(), memo))  # type: ignore[no-untyped-call]  # torch's
        copied._restore(self._parameters)
        return copied

    def _restore(self, before: Mapping[str, nn.Parameter | None]) -> None:
        for name, parameter in self._parameters.items():
            old = before.get(name)
            if parameter is not None and old is not None and parameter is not old:
                vars(parameter).update({key: value for key, value in vars(old).items() if key not in vars(parameter)})

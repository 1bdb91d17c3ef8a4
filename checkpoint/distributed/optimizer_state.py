"""State of an optimizer by the names of the parameters, independent of the layout of ranks.

::

    exp_avg of embed.weight     rectangles of the whole tensor, as those of the parameter
    master of embed.weight      rectangles in float32, of a parameter in half precision
    step of embed.weight        a number
"""

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nxdpp.checkpoint.distributed.rectangles import Placement, placement_of
from nxdpp.checkpoint.distributed.scalars import dtype_named, is_scalar, read_scalar, written_scalar
from nxdpp.checkpoint.distributed.tensor_blocks import TensorBlocks, blocks_of
from nxdpp.optimizer.fp32_adamw import AdamW_FP32OptimParams
from nxdpp.optimizer.zero1 import Zero1Optimizer

MASTER = "master"
"""Key of the values that an optimizer steps in place of a parameter in lower precision."""

Description = dict[str, Any]
"""By key of a state: a number (``scalars``), ``{"tensor": dtype}``, or ``{"tensor": dtype, "shape": [...]}``."""


@dataclass(frozen=True)
class Held:
    """State of a parameter, or of a flat range of it, that this rank keeps.

    Attributes:
        name: of the parameter in the whole model.
        parameter: of this rank.
        start: first element of the range in the flattened ``parameter``.
        values: those that the optimizer steps: the parameter, a flat range of it, or of a master copy.
        states: of the optimizer that steps them.
        keeps_master: ``states`` has the master copy.
    """

    name: str
    parameter: nn.Parameter
    start: int
    values: torch.Tensor
    states: MutableMapping[Any, dict[str, Any]]
    keeps_master: bool

    def state(self) -> dict[str, Any]:
        """The state, with a master copy under its key."""
        state = dict(self.states.get(self.values, {}))
        return state if self.values.dtype == self.parameter.dtype else {**state, MASTER: self.values}

    @property
    def is_shard(self) -> bool:
        """Other replicas keep the rest of the parameter's state."""
        return self.values is not self.parameter

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the state but those that are numbers of the document."""
        return {key: value for key, value in self.state().items() if not _is_number(key, value)}

    def description(self) -> Description:
        """The keys of the state with their numbers and dtypes.

        Raises ``ValueError`` for values that belong to no element of a divided parameter.
        """
        return {key: self._described(key, value) for key, value in self.state().items()}

    def blocks(self, value: torch.Tensor) -> TensorBlocks:
        """``value`` of the state as rectangles of the whole."""
        placement = placement_of(self.parameter)
        if value.shape != self.values.shape:
            placement = Placement(tuple(value.shape), tuple(value.shape), -1, ())
        return blocks_of(value, placement, self.start)

    def leaves_master(self, saved: Description) -> bool:
        """Return whether ``saved`` has a master copy for which the optimizer has no place."""
        return MASTER in saved and not self.keeps_master and self.values.dtype != dtype_named(saved[MASTER]["tensor"])

    def new_state(self, saved: Description) -> dict[str, Any]:
        """Return a state with the keys of a checkpoint, whose tensors are to be read.

        A saved master copy is read into that of the optimizer. If there is none it is read into the parameter of the
        same dtype. Otherwise it is left out: the parameter has its rounded values.
        """
        before = self.states.get(self.values, {})
        state: dict[str, Any] = {}
        for key, described in saved.items():
            if "tensor" not in described:
                old = before.get(key)
                device = old.device if isinstance(old, torch.Tensor) else torch.device("cpu")
                state[key] = read_scalar(described, device)
                continue
            dtype = dtype_named(described["tensor"])
            if key == MASTER and not self.keeps_master:
                if self.values.dtype == dtype:
                    state[key] = self.values
                continue
            shape = torch.Size(described.get("shape", self.values.shape))
            old = before.get(key)
            fits = isinstance(old, torch.Tensor) and (old.shape, old.dtype) == (shape, dtype)
            state[key] = old if fits else torch.zeros(shape, dtype=dtype, device=self.values.device)
        return state

    def give(self, state: dict[str, Any]) -> None:
        """Give the optimizer a state of ``new_state`` that was read."""
        own = {key: value for key, value in state.items() if value is not self.values}
        if own:
            self.states[self.values] = own
        else:
            self.states.pop(self.values, None)

    def _described(self, key: str, value: Any) -> Any:
        if _is_number(key, value):
            return written_scalar(value)
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"the state {key!r} of {self.name} is a {type(value).__name__}: {_KINDS}")
        dtype = str(value.dtype).removeprefix("torch.")
        if value.shape == self.values.shape:
            return {"tensor": dtype}
        is_whole = placement_of(self.parameter).dim < 0 and self.values is self.parameter
        if not is_whole:
            raise ValueError(
                f"the state {key!r} of {self.name} has shape {list(value.shape)}, and this rank has a part of the "
                f"parameter, of shape {list(self.values.shape)}: {_KINDS}"
            )
        return {"tensor": dtype, "shape": list(value.shape)}


_KINDS = "a checkpoint holds numbers, and tensors of the parameter's shape. Use an elementwise optimizer."


def held_state(optimizer: Optimizer, names: Mapping[int, str]) -> Iterator[Held]:
    """Give the state of each parameter that ``optimizer`` keeps on this rank, with its name by ``id`` of ``names``.

    Raises ``ValueError`` for a parameter without a name: the model does not have it.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        _check_name(parameter, names)
    if isinstance(optimizer, Zero1Optimizer):
        states = optimizer.base_optimizer.state
        for shard, values, _ in optimizer.shards():
            parameter = parameters[shard.parameter]
            yield Held(names[id(parameter)], parameter, shard.start, values, states, keeps_master=False)
        return
    keeps_master = isinstance(optimizer, AdamW_FP32OptimParams)
    for parameter in parameters:
        is_half = parameter.dtype.itemsize < torch.float32.itemsize
        yield Held(names[id(parameter)], parameter, 0, parameter, optimizer.state, keeps_master and is_half)


def optimizer_class(optimizer: Optimizer) -> str:
    """Name of the class of torch that steps the values: a state is that of this class."""
    if isinstance(optimizer, Zero1Optimizer):
        optimizer = optimizer.base_optimizer
    return "AdamW" if isinstance(optimizer, AdamW_FP32OptimParams) else type(optimizer).__name__


def _is_number(key: str, value: Any) -> bool:
    """Return whether the document has ``value``; a master copy is read into memory that is there."""
    return key != MASTER and is_scalar(value)


def _check_name(parameter: nn.Parameter, names: Mapping[int, str]) -> None:
    if id(parameter) not in names:
        raise ValueError(
            f"the optimizer has a parameter of shape {list(parameter.shape)} that the model does not have: make the "
            f"optimizer with the parameters of this model, after the model is moved to its device."
        )

"""State of an optimizer by the names of the parameters, independent of the layout of ranks.

::

    exp_avg of embed.weight     rectangles of the whole tensor, the same as the parameter's
    master of embed.weight      rectangles in float32, of a parameter in half precision
    step of embed.weight        a number
"""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nxdpp.checkpoint.distributed.rectangles import PlaceInWhole, TensorBlocks, blocks_of, placement_of
from nxdpp.checkpoint.distributed.structured import dtype_named, is_scalar, read_scalar, written_scalar
from nxdpp.gradients.gradient_dtype import master_dtype
from nxdpp.gradients.optimizer.fp32_adamw import AdamW_FP32OptimParams
from nxdpp.gradients.optimizer.zero1 import Zero1Optimizer
from nxdpp.gradients.shards.local_tensors import is_sharded, local_rows

MASTER = "master"
"""Key of the values that an optimizer steps in place of a parameter in lower precision."""

Description = dict[str, Any]
"""By key of a state: a number (``scalars``), ``{"tensor": dtype}``, or ``{"tensor": dtype, "shape": [...]}``."""


@dataclass(frozen=True)
class Held:
    """State of a parameter, or of a flat range of it, that this rank keeps, by its ``name`` in the whole model.

    ``start`` is the first element of the range in the flattened ``parameter``. ``values`` is what the optimizer steps:
    the parameter, a flat range of it, or of a master copy. ``states`` is of the optimizer that steps them, ``dtype`` of
    the stepped values. If ``values`` have a different one, ``states`` has a master copy in it.
    """

    name: str
    parameter: nn.Parameter
    start: int
    values: torch.Tensor
    states: MutableMapping[Any, dict[str, Any]]
    dtype: torch.dtype

    def state(self) -> dict[str, Any]:
        """The state, with a master copy under its key."""
        state = dict(self.states.get(self.values, {}))
        if MASTER in state and not self.keeps_master:
            raise ValueError(
                f"the optimizer has a state {MASTER!r} of its own of {self.name}, and a checkpoint has the values of "
                f"nxdpp's optimizers under this key: give the state another key."
            )
        return {**state, MASTER: self.values} if self.is_master else state

    @property
    def is_shard(self) -> bool:
        """Other replicas keep the rest of the parameter's state."""
        return self.values is not self.parameter or is_sharded(self.parameter)

    @property
    def keeps_master(self) -> bool:
        """The state has a master copy."""
        return self.dtype != self.values.dtype

    @property
    def is_master(self) -> bool:
        """The values are a master copy's."""
        return self.values.dtype != self.parameter.dtype

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the state, without those that the document stores as numbers."""
        return {key: value for key, value in self.state().items() if not _is_number(key, value)}

    def description(self) -> Description:
        """The keys of the state with their numbers and dtypes.

        Raises ``ValueError`` for values that belong to no element of a divided parameter.
        """
        return {key: self._described(key, value) for key, value in self.state().items()}

    def blocks(self, value: torch.Tensor, memory: torch.Tensor) -> TensorBlocks:
        """``memory``, which has this rank's elements of ``value`` of the state, as rectangles of the whole."""
        placement = placement_of(self.parameter)
        if not self._is_of_elements(value):
            placement = PlaceInWhole(tuple(value.shape), tuple(value.shape), -1, ())
        return blocks_of(memory, placement, self.start)

    def _is_of_elements(self, value: Any) -> bool:
        """Return whether ``value`` is a tensor with an element for each of the stepped values, on the same ranks."""
        if not isinstance(value, torch.Tensor) or value.shape != self.values.shape:
            return False
        if is_sharded(value) and is_sharded(self.values):
            return bool(value.placements == self.values.placements)
        return is_sharded(value) == is_sharded(self.values)

    def leaves_master(self, saved: Description) -> bool:
        """Return whether ``saved`` has a master copy for which the optimizer has no place."""
        return MASTER in saved and not self.keeps_master and not self.is_master

    def new_state(self, saved: Description, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state with the keys of a checkpoint, whose tensors are to be read in the dtypes that were saved.

        A saved master copy is read into the optimizer's. If the optimizer has none, it is left out: the parameter has
        its rounded values. ``options`` are the options of the parameter's group.

        Raises ``ValueError`` for values that belong to no element of a divided parameter.
        """
        before = self.states.get(self.values, {})
        state: dict[str, Any] = {}
        for key, described in saved.items():
            old = before.get(key)
            if "tensor" not in described:
                state[key] = read_scalar(described, self._device(key, old, options))
                continue
            if "shape" in described:
                self._check_whole(key, described["shape"])
            dtype = dtype_named(described["tensor"])
            if key == MASTER and not self.keeps_master:
                if not self.is_master:
                    continue
                old = self.values
            shape = torch.Size(described.get("shape", self.values.shape))
            fits = isinstance(old, torch.Tensor) and (old.shape, old.dtype) == (shape, dtype)
            if is_sharded(self.values):
                fits = fits and self._is_of_elements(old)
                made = partial(torch.zeros_like, self.values, requires_grad=False)
            else:
                made = partial(torch.zeros, shape, device=self.values.device)
            state[key] = old if fits else made(dtype=dtype)
        return state

    @torch.no_grad()
    def give(self, state: Mapping[str, Any], saved: Description) -> None:
        """Give the optimizer a state of ``new_state`` that was read, in its own dtypes."""
        stepped = dtype_named(saved[MASTER]["tensor"]) if MASTER in saved else self.parameter.dtype
        own = {key: self._converted(key, value, stepped) for key, value in state.items()}
        if self.is_master:
            # Without a saved copy the values come from the parameter.
            flat = self.parameter.detach().reshape(-1)[self.start : self.start + self.values.numel()]
            read = own.pop(MASTER, flat.view_as(self.values))
            if read is not self.values:
                self.values.copy_(read)
        if own:
            self.states[self.values] = own
        elif float(self.states.get(self.values, {}).get("step", 1)) != 0:
            # State of the constructor stays: Adagrad makes it only there.
            self.states.pop(self.values, None)

    def _device(self, key: str, old: Any, options: Mapping[str, Any]) -> torch.device:
        """The device of a number in a tensor, as in torch: ``step`` is on the host unless a kernel reads it."""
        is_step = key == "step"
        if is_step and (options.get("capturable") or options.get("fused")):
            return self.values.device
        if isinstance(old, torch.Tensor):
            return old.device
        return torch.device("cpu") if is_step else self.values.device

    def _converted(self, key: str, value: Any, stepped: torch.dtype) -> Any:
        """Return ``value`` in this optimizer's dtype if it had the dtype of the values ``stepped`` at the save."""
        is_of_elements = isinstance(value, torch.Tensor) and (value.ndim > 0 or self.parameter.ndim == 0)
        if not is_of_elements or key == "step" or value.dtype != stepped:
            return value
        return value.to(self.dtype)

    def _described(self, key: str, value: Any) -> Any:
        if _is_number(key, value):
            return written_scalar(value)
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"the state {key!r} of {self.name} is a {type(value).__name__}: {_KINDS}")
        if value.layout != torch.strided:
            raise ValueError(f"the state {key!r} of {self.name} is a tensor of layout {value.layout}: {_KINDS}")
        dtype = str(value.dtype).removeprefix("torch.")
        if self._is_of_elements(value):
            return {"tensor": dtype}
        self._check_whole(key, value.shape)
        return {"tensor": dtype, "shape": list(value.shape)}

    def _check_whole(self, key: str, shape: Sequence[int]) -> None:
        """Raise ``ValueError`` for state of a different ``shape`` where this rank has a part of the parameter."""
        if placement_of(self.parameter).dim >= 0 or self.is_shard:
            raise ValueError(
                f"the state {key!r} of {self.name} has shape {list(shape)}, and this rank has a part of the parameter, "
                f"of shape {list(local_rows(self.values).shape)}: {_KINDS}"
            )


_KINDS = (
    "a checkpoint holds numbers, and dense tensors of the parameter's shape. Use an elementwise optimizer. In one "
    "process user_content=optimizer.state_dict() holds lists and dicts of them too."
)


def held_state(optimizer: Optimizer, names: Mapping[int, str]) -> Iterator[Held]:
    """Give the state of each parameter that ``optimizer`` keeps on this rank, with its name by ``id`` of ``names``.

    ``names_of_group`` has found a name for each. Raises ``ValueError`` as ``check_is_held``.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    check_is_held(optimizer)
    if isinstance(optimizer, Zero1Optimizer):
        states = optimizer.base_optimizer.state
        for shard, values, _ in optimizer.shards():
            parameter = parameters[shard.parameter]
            yield Held(names[id(parameter)], parameter, shard.start, values, states, values.dtype)
        return
    has_masters = isinstance(optimizer, AdamW_FP32OptimParams)
    for parameter in parameters:
        dtype = master_dtype(parameter.dtype) if has_masters else parameter.dtype
        yield Held(names[id(parameter)], parameter, 0, parameter, optimizer.state, dtype)


def check_is_held(optimizer: Optimizer) -> None:
    """Raise ``ValueError`` for state that belongs to no parameter: a checkpoint would lose it."""
    base = optimizer.base_optimizer if isinstance(optimizer, Zero1Optimizer) else optimizer
    others: list[Any] = [key for key in base.state if not isinstance(key, torch.Tensor)]
    if type(base).state_dict is not Optimizer.state_dict:
        others += [key for key in base.state_dict() if key not in ("state", "param_groups")]
    if others:
        raise ValueError(
            f"{type(base).__name__} has the state {others[0]!r}, which belongs to no parameter: a checkpoint holds the "
            f"state of parameters and the options of groups. Keep it as an option of the parameter groups."
        )


def is_stepped(saved: Description) -> bool:
    """Return whether ``saved`` is more than the state that a constructor makes, as Adagrad's does."""
    return bool(saved) and saved.get("step", {}).get("number") != 0


def not_sharded(optimizer: Optimizer, names: Mapping[int, str]) -> list[str]:
    """Names of parameters for which a sharding ``optimizer`` keeps no state, as they require no gradient."""
    if not isinstance(optimizer, Zero1Optimizer):
        return []
    sharded = set(map(id, optimizer.sharded_parameters()))
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [names[id(parameter)] for parameter in parameters if id(parameter) not in sharded]


def optimizer_class(optimizer: Optimizer) -> str:
    """Name of the torch class that steps the values: the state belongs to this class."""
    if isinstance(optimizer, Zero1Optimizer):
        optimizer = optimizer.base_optimizer
    return optimizer.torch_class if isinstance(optimizer, AdamW_FP32OptimParams) else type(optimizer).__name__


def _is_number(key: str, value: Any) -> bool:
    """Return whether the document has ``value``; a master copy is read into existing memory."""
    return key != MASTER and is_scalar(value)

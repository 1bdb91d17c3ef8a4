"""Initial values of a part of a parameter, equal to that part of the whole parameter in one process.

The numbers of the whole are drawn in blocks of rows, and the rank keeps its own rows. So it needs memory only for its
part and a block::

    init_method     normal_(whole)                      mul_(whole, 2)
    rank 1 of 2     block 0   block 1   block 2 ...     mul_(part, 2)
                       └ own rows ─▶ part

This works where the function that initialises fills the whole with normal or uniform numbers, and changes it element
by element, as most functions of ``torch.nn.init`` do. Otherwise the whole is in memory for a moment. Inside
``deferred_init`` the constructor draws nothing, and the whole is in memory when the part is materialised.
"""

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from nxdpp.ground.torch_names import SCHEMA, TorchDispatchMode, pytree
from nxdpp.initialization.named_streams import drawn_as
from nxdpp.initialization.recorder import is_recording
from nxdpp.tensor.padding import own_ranges

InitMethod = Callable[[torch.Tensor], object]
"""Initialises a whole tensor in place, such as ``torch.nn.init.normal_``."""

_aten = torch.ops.aten
_FILL_WITH_RANDOM = {_aten.normal_, _aten.uniform_}
_FILL = _FILL_WITH_RANDOM | {_aten.zero_, _aten.fill_}
# torch makes normal numbers in blocks of this size.
_TOGETHER = 16
_NUMBERS_AT_ONCE = 1 << 20


def fill_parameter(parameter: nn.Parameter, init_method: InitMethod, keep_whole: bool = False) -> torch.Tensor | None:
    """Write what this rank holds of a tensor that ``init_method`` initialises; a meta tensor stays as it is.

    The CPU's generator ends in the state that it has after the whole tensor. The attributes of ``parameter`` tell how
    the whole is divided, see ``tensor_attributes``; its padding gets zeros. With ``keep_whole`` the whole is drawn at
    once and returned on the CPU, but not for a meta tensor and in ``deferred_init``.
    """
    if parameter.is_meta:
        return None
    keep_whole = keep_whole and not is_recording()
    with torch.no_grad():
        values = parameter if parameter.device.type == "cpu" else torch.empty_like(parameter, device="cpu")
        part = _OwnPart(values, parameter)
        whole = None
        if part.is_whole:
            init_method(values)
            whole = values.detach().clone() if keep_whole else None
        else:
            whole = part.fill(init_method, keep_whole)
        if values is not parameter:
            parameter.copy_(values)
    return whole


class _OwnPart:
    """``values`` of this rank's part, which ``parameter`` describes."""

    def __init__(self, values: torch.Tensor, parameter: nn.Parameter) -> None:
        self._values = values
        self._dim = vars(parameter)["partition_dim"]
        self._shape = list(values.shape)
        self._ranges = own_ranges(parameter) if self._dim >= 0 else []
        if self._dim >= 0:
            self._shape[self._dim] = vars(parameter)["whole_size"]
        self._chunk = values.shape[self._dim] // vars(parameter)["partition_stride"] if self._dim >= 0 else 0
        self.is_whole = self._dim < 0 or (vars(parameter)["num_partitions"] == 1 and self._shape == list(values.shape))

    def fill(self, init_method: InitMethod, keep_whole: bool) -> torch.Tensor | None:
        """Write the part of a whole tensor that ``init_method`` initialises; with ``keep_whole`` return the whole."""
        # The recorder of deferred_init keeps each operation; blocks would be many.
        in_one = keep_whole or is_recording()
        operations = None if in_one else _operations(init_method, self._shape, self._values.dtype)
        whole = None
        if operations is None:
            whole = self._empty(self._shape)
            with drawn_as(whole, self._values):
                init_method(whole)
            self._take(whole, 0)
        else:
            for operation in operations:
                self._run(*operation)
        for _, own, count in self._ranges:
            if count < self._chunk:
                self._values.narrow(self._dim, own + count, self._chunk - count).fill_(0)
        return whole if keep_whole else None

    def _run(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if function.overloadpacket not in _FILL_WITH_RANDOM:
            function(self._values, *arguments, **keywords)
            return
        rows, columns = self._shape[0], math.prod(self._shape[1:])
        first = 0
        for count in _block_rows(rows, columns):
            block = self._empty([count, *self._shape[1:]])
            with drawn_as(block, self._values):
                function(block, *arguments, **keywords)
            self._take(block, first)
            first += count

    def _take(self, block: torch.Tensor, first: int) -> None:
        """Copy this rank's elements of ``block``, which has the rows of the whole from ``first`` on."""
        end = first + len(block)
        for start, own, count in self._ranges:
            if self._dim > 0:
                self._values[first:end].narrow(self._dim, own, count).copy_(block.narrow(self._dim, start, count))
                continue
            low, high = max(start, first), min(start + count, end)
            if low < high:
                self._values[own + low - start : own + high - start].copy_(block[low - first : high - first])

    def _empty(self, shape: list[int]) -> torch.Tensor:
        return torch.empty(shape, dtype=self._values.dtype, device="cpu")


def _block_rows(rows: int, columns: int) -> Iterator[int]:
    """Numbers of rows that are drawn at once; the sum is ``rows``.

    Blocks of normal numbers must have a multiple of 16 elements, and the last one at least 16: then the numbers
    are the same as in one draw.
    """
    step = _TOGETHER // math.gcd(_TOGETHER, columns) if columns else 1
    count = max(step, _NUMBERS_AT_ONCE // max(1, columns) // step * step)
    while rows - count >= _TOGETHER:
        yield count
        rows -= count
    yield rows


def _operations(
    init_method: InitMethod, shape: list[int], dtype: torch.dtype
) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]] | None:
    """Operations of ``init_method`` on a tensor of ``shape``; ``None`` if they do not work on parts."""
    states = random.getstate(), np.random.get_state()
    # A tensor of the CPU without memory: torch.nn.init does not touch meta tensors.
    whole = torch.empty((), dtype=dtype, device="cpu").expand(shape)
    recipe = _Recipe(whole)
    try:
        with recipe:
            init_method(whole)
    # A function that needs the values is called again, with values, and then raises its own errors.
    except Exception:
        random.setstate(states[0])
        np.random.set_state(states[1])
        return None
    first = recipe.operations[0][0].overloadpacket if recipe.operations else None
    return recipe.operations if first in _FILL else None


class _Recipe(TorchDispatchMode):
    """Notes the operations on one tensor, without running them; ``NotImplementedError`` where one needs the whole."""

    def __init__(self, whole: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        self._whole = whole

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten.detach.default and self._is_whole(args[0]):
            return func(*args)
        if not args or not self._is_whole(args[0]) or not SCHEMA.of(func).is_mutable:
            raise NotImplementedError(f"{func} is no change of the tensor in place")
        if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves((args[1:], kwargs))):
            raise NotImplementedError(f"{func} reads another tensor")
        if func.overloadpacket not in _FILL_WITH_RANDOM and not _is_elementwise(func):
            raise NotImplementedError(f"{func} does not change each element alone")
        self.operations.append((func, args[1:], kwargs))
        return args[0]

    def _is_whole(self, tensor: Any) -> bool:
        if not isinstance(tensor, torch.Tensor) or tensor.data_ptr() != self._whole.data_ptr():
            return False
        return (tensor.shape, tensor.stride()) == (self._whole.shape, self._whole.stride())


def _is_elementwise(function: Any) -> bool:
    is_random = torch.Tag.nondeterministic_seeded in function.tags
    return function.overloadpacket in _FILL or (torch.Tag.pointwise in function.tags and not is_random)

"""Linear layers of query, key and value for grouped-query attention, with the name of NeuronX Distributed.

Groups of neighbouring ranks hold copies of the same key and value heads. With 2 heads on 8 ranks, 4 copies of each::

    tensor group      0 1 2 3 4 5 6 7
    key-value head    0 0 0 0 1 1 1 1        groups [0 1 2 3] and [4 5 6 7]
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn import init

from nxdpp.ground.torch_names import LOAD_OWN
from nxdpp.ranks import current_state, parallel_state
from nxdpp.ranks.transfer_groups import own_group
from nxdpp.tensor import mappings
from nxdpp.tensor.initial_parts import InitMethod, fill_parameter, refuse_master_weight
from nxdpp.tensor.layers import column_parallel
from nxdpp.tensor.overlapped_linear import WeightRows
from nxdpp.tensor.parallel_layer import ParallelLayer, init_as_torch

_NAMES = ("q", "k", "v")
# By number of copies: the tensor group for which the group was made, and this rank's group.
_groups: dict[int, tuple[ProcessGroup, ProcessGroup]] = {}


class GQAQKVColumnParallelLinear(ParallelLayer):
    """Query, key and value as column-parallel layers of one input, whose gradient takes one all-reduce.

    There may be fewer key-value heads than ranks. ``kv_size_multiplier`` neighbouring ranks then hold a copy of the
    same heads, and the gradients of the copies are summed. Rank ``r`` has part ``r // kv_size_multiplier``. With a
    multiplier of ranks / key-value heads it is the head that the rank's query heads use in a model of one process.
    NeuronX Distributed has part ``r % (ranks / multiplier)``, and orders the query heads to fit.

    The parameters are ``weight_q``, ``weight_k``, ``weight_v``, ``bias_q``, ``bias_k`` and ``bias_v``. Their initial
    values are drawn as for three ``torch.nn.Linear`` in this order. A loaded ``weight_qkv`` or ``bias_qkv``, this
    rank's three parts one after another, is split, where copies are on all ranks or there are none.

    Args:
        input_size: size ``I`` of an input.
        output_sizes: sizes of the whole query, and of the whole key and value: ``[heads * D, kv_heads * D]``.
        bias: add biases.
        gather_output: return the whole query, key and value on each rank, without copies.
        dtype, device, init_method: as in ``ColumnParallelLinear``.
        sequence_parallel_enabled: gather the sequence first; each rank gives its part.
        keep_master_weight: only ``False``: no layer keeps the whole weights.
        kv_size_multiplier: number of ranks that hold each part of key and value.
        fuse_qkv: both values give one message for the three products. NeuronX Distributed's ``True`` has one parameter
            ``weight_qkv``. Here there are three in either case: a norm, a save and a load of one weight would have to
            know which of its rows are copies.
        reduce_dtype: in which gradients are summed over ranks, as in ``ColumnParallelLinear``.
        sequence_dimension: the dimension of the sequence.

    Shape: ``(..., I)`` -> query ``(..., Q / ranks)``, key and value ``(..., KV * kv_size_multiplier / ranks)``.

    Raises:
        TypeError: for a ``dtype`` that is a bool.
        ValueError: for sizes that do not divide, and in a load of a fused weight whose copies are on some ranks.
    """

    _shown = ("input_size", "output_sizes", "kv_size_multiplier")

    def __init__(
        self,
        input_size: int,
        output_sizes: Sequence[int],
        bias: bool = True,
        gather_output: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | int | None = None,
        init_method: InitMethod | None = None,
        sequence_parallel_enabled: bool = False,
        keep_master_weight: bool = False,
        kv_size_multiplier: int = 1,
        fuse_qkv: bool = True,
        reduce_dtype: torch.dtype | None = None,
        *,
        sequence_dimension: int | None = None,
    ) -> None:
        super().__init__()
        refuse_master_weight(keep_master_weight)
        if isinstance(dtype, bool):
            raise TypeError(
                f"the fifth argument of GQAQKVColumnParallelLinear is dtype, as in NeuronX Distributed: give "
                f"sequence_parallel_enabled={dtype} and what follows it by name"
            )
        query, key_value = output_sizes
        ranks = self.tensor_parallel_size
        if kv_size_multiplier < 1 or ranks % kv_size_multiplier:
            raise ValueError(
                f"kv_size_multiplier={kv_size_multiplier} does not divide the tensor-parallel size {ranks}: so many "
                f"ranks have the same key and value heads"
            )
        if query % ranks or key_value * kv_size_multiplier % ranks:
            raise ValueError(
                f"GQAQKVColumnParallelLinear divides query={query} and key_value={key_value} * "
                f"kv_size_multiplier={kv_size_multiplier} over {ranks} ranks: give multiples of {ranks}, of whole heads"
            )
        self.input_size, self.output_sizes = input_size, (query, key_value)
        self.kv_size_multiplier = kv_size_multiplier
        self.gather_output, self.fuse_qkv = gather_output, fuse_qkv
        self.reduce_dtype = reduce_dtype
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension or 0
        self._init_method = init_method
        self.weight_q: nn.Parameter
        self.weight_k: nn.Parameter
        self.weight_v: nn.Parameter
        self.bias_q: nn.Parameter | None
        self.bias_k: nn.Parameter | None
        self.bias_v: nn.Parameter | None
        for name in _NAMES:
            copies, size = (1, query) if name == "q" else (kv_size_multiplier, key_value)
            self._add_part(f"weight_{name}", (size, input_size), 0, dtype, device, copies=copies)
            if bias:
                self._add_part(f"bias_{name}", (size,), 0, dtype, device, copies=copies)
            else:
                self.register_parameter(f"bias_{name}", None)
        # All ranks make the groups here.
        kv_shared_group(kv_size_multiplier)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weights and biases."""
        bound = 1 / math.sqrt(self.input_size) if self.input_size > 0 else 0
        for name in _NAMES:
            self._fill_weight(name)
            if self.bias_q is not None:
                fill_parameter(self.get_parameter(f"bias_{name}"), lambda whole: init.uniform_(whole, -bound, bound))

    def initialize_weight_biases(self) -> None:
        """Do ``reset_parameters``, under the name that scripts of NeuronX Distributed call."""
        self.reset_parameters()

    def init_weight_cpu(self) -> None:
        """Initialise the weights from numbers that are drawn on the CPU."""
        for name in _NAMES:
            self._fill_weight(name)

    def _fill_weight(self, name: str) -> None:
        fill_parameter(self.get_parameter(f"weight_{name}"), self._init_method or init_as_torch)

    def __getattr__(self, name: str) -> Any:
        """Raise ``AttributeError``, for the fused parameters of NeuronX Distributed with the remedy."""
        if name in ("weight_qkv", "bias_qkv"):
            kind = name.removesuffix("_qkv")
            raise AttributeError(
                f"GQAQKVColumnParallelLinear has {kind}_q, {kind}_k and {kind}_v also with fuse_qkv=True: use these in "
                f"the place of {name}, torch.cat of them for a fused file. A file with {name} can be loaded."
            )
        return super().__getattr__(name)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        for kind in ("weight", "bias"):
            sizes = [len(each) for name in _NAMES if (each := getattr(self, f"{kind}_{name}")) is not None]
            fused = state_dict.get(f"{prefix}{kind}_qkv")
            if sizes and fused is not None and len(fused) == sum(sizes):
                if 1 < self.kv_size_multiplier < self.tensor_parallel_size:
                    raise ValueError(
                        f"{prefix}{kind}_qkv with kv_size_multiplier={self.kv_size_multiplier} on "
                        f"{self.tensor_parallel_size} ranks: NeuronX Distributed puts copies on other ranks, and may "
                        f"order the heads otherwise. Convert its files with python -m "
                        f"nxdpp.scripts.checkpoint_converter --convert_to_full_state."
                    )
                del state_dict[f"{prefix}{kind}_qkv"]
                state_dict.update(zip((f"{prefix}{kind}_{name}" for name in _NAMES), fused.split(sizes), strict=True))
        LOAD_OWN.of(super())(state_dict, prefix, *rest)

    def padded_sizes(self, ratio: Fraction) -> dict[str, Fraction]:
        """For ``ratio`` times as many heads, the size of each parameter; copied key-value heads stay as they are.

        Raises ``ValueError`` where padded query heads would belong to other key-value heads.
        """
        query, key_value = self.output_sizes
        if ratio != 1 and 1 < self.kv_size_multiplier < self.tensor_parallel_size:
            raise ValueError(
                f"query heads cannot be padded over {self.tensor_parallel_size} ranks with kv_size_multiplier="
                f"{self.kv_size_multiplier}: heads would move to ranks with other key-value heads"
            )
        other = Fraction(key_value) if self.kv_size_multiplier > 1 else key_value * ratio
        sizes = dict(zip(_NAMES, (query * ratio, other, other), strict=True))
        kinds = ("weight", "bias") if self.bias_q is not None else ("weight",)
        return {f"{kind}_{name}": size for name, size in sizes.items() for kind in kinds}

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return query, key and value, or this rank's parts of them."""
        self._check_group()
        parts = [
            WeightRows(self.weight_q, self.bias_q),
            self._shared(self.weight_k, self.bias_k),
            self._shared(self.weight_v, self.bias_v),
        ]
        dim = self.sequence_dimension if self.sequence_parallel_enabled else None
        query, key, value = column_parallel(input_, parts, dim, self.reduce_dtype)
        if not self.gather_output:
            return query, key, value
        whole_query, whole_key_value = self.output_sizes
        return (
            self._gathered(query, 1, whole_query),
            self._gathered(key, self.kv_size_multiplier, whole_key_value),
            self._gathered(value, self.kv_size_multiplier, whole_key_value),
        )

    def _shared(self, weight: torch.Tensor, bias: torch.Tensor | None) -> WeightRows:
        """The parameters, whose gradients are summed over the ranks with copies."""
        group = kv_shared_group(self.kv_size_multiplier)
        if group is None:
            return WeightRows(weight, bias)
        copied = partial(
            mappings.copy_to_tensor_model_parallel_region, process_group=group, reduce_dtype=self.reduce_dtype
        )
        return WeightRows(copied(weight), None if bias is None else copied(bias))

    def _gathered(self, part: torch.Tensor, copies: int, size: int) -> torch.Tensor:
        """The parts of all ranks, the first copy of each, without padding; that copy gets the gradient."""
        gathered = mappings.gather_from_tensor_model_parallel_region(part)
        by_part = gathered.unflatten(-1, (-1, copies, part.shape[-1]))
        whole: torch.Tensor = by_part[..., 0, :].flatten(-2)[..., :size]
        return whole


def kv_shared_group(copies: int) -> ProcessGroup | None:
    """This rank's group of ``copies`` ranks; ``None`` for one copy, and in the debug mode.

    The first call with a number is collective over all ranks: each builds the same model.
    """
    if copies == 1 or parallel_state.is_debug():
        return None
    tensor_group = parallel_state.get_tensor_model_parallel_group()
    made_for, group = _groups.get(copies, (None, None))
    if group is None or made_for is not tensor_group:
        lists = parallel_state.get_tensor_model_parallel_group(as_list=True)
        members = [ranks[first : first + copies] for ranks in lists for first in range(0, len(ranks), copies)]
        group = own_group(members, dist.get_backend(tensor_group), current_state.with_groups().timeouts.of_operations)
        _groups[copies] = tensor_group, group
    return group

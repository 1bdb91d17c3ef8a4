"""Division of each tensor of a model over NxD's tensor and expert ranks, and its inverse."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from nxdpp.doors.nxd.converter.head_order import BACKENDS, HeadOrder, are_copies, heads_of_model, heads_of_rank

State = dict[str, torch.Tensor]

_FUSED = ("gate_up_proj", "qkv_proj")
_EXPERTS = "expert_mlps"


class WeightNames(Protocol):
    """The questions about the tensors of its model that a converter answers."""

    def get_partition_dim(self, name: str) -> int:
        """Return the divided dimension. Raises ``ValueError`` for a tensor that each rank has whole."""

    def get_hf_to_nxd_model_keys(self, qkv_linear: bool, is_gqa: bool) -> tuple[dict[str, str], ...]:
        """Return the ends of names from Hugging Face to NxD, and back."""

    def get_fused_qkv_key(self) -> str:
        """Return the end of the name of a fused query, key and value."""


class TensorDivision:
    """Divides whole tensors over ranks by their names, and joins the ranks' tensors.

    Args:
        names: the converter.
        args: its options.
        query_heads, kv_heads: numbers of heads of the model.

    Raises ``ValueError`` for sizes that do not divide.
    """

    def __init__(self, names: WeightNames, args: argparse.Namespace, query_heads: int, kv_heads: int) -> None:
        self._names, self._args = names, args
        self._ranks: int = args.tp_size
        self._heads = query_heads, kv_heads
        is_gqa = query_heads != kv_heads
        self._to_nxd, self._to_hf = names.get_hf_to_nxd_model_keys(args.qkv_linear, is_gqa)
        self._order = None
        if args.qkv_linear:
            self._order = HeadOrder(
                query_heads, kv_heads, args.tp_size, args.kv_size_multiplier, args.hw_backend, args.pad_attn_heads
            )
        if args.coalesce_qkv and is_gqa:
            raise ValueError(
                f"--coalesce_qkv needs as many key-value heads as query heads, and the model has {kv_heads} and "
                f"{query_heads}: give --qkv_linear True."
            )
        # End of the name of a fused tensor, and of the tensors in it.
        self._fused: dict[str, tuple[str, ...]] = {"gate_up_proj": ("gate_proj", "up_proj")}
        if not is_gqa and not args.qkv_linear:
            self._fused["qkv_proj"] = ("q_proj", "k_proj", "v_proj")
        if args.fuse_qkv:
            for kind in ("weight", "bias"):
                fused = names.get_fused_qkv_key().replace("weight", kind)
                self._fused[fused] = tuple(f"qkv_proj.{kind}_{each}" for each in "qkv")

    def of_rank(self, state: Mapping[str, torch.Tensor], rank: int, expert: int) -> State:
        """Return the tensors of a tensor rank and an expert rank; the first expert rank has all but the experts."""
        parts: State = {}
        for name, whole in state.items():
            if any(fused in name for fused in _FUSED):
                raise ValueError(
                    f"{name} is one weight of several projections, each of which is divided: split it in "
                    f"pre_process_full_state_before_tp_conversion."
                )
            if _EXPERTS in name:
                whole = _slice(name, whole, 0, expert, self._args.ep_size, "--ep_size")
            elif expert:
                continue
            parts[_with_end(name, self._to_nxd)] = self._part(name, whole, rank)
        for fused, members in self._fused.items():
            if fused != "qkv_proj" or self._args.coalesce_qkv:
                self._fuse(parts, fused, members)
        return parts

    def whole(self, ranks: Sequence[Sequence[Mapping[str, torch.Tensor]]]) -> State:
        """Return the whole tensors of the states of tensor ranks, each of expert ranks."""
        split = [[self._split(dict(state)) for state in experts] for experts in ranks]
        names = split[0][0]
        if any(experts[0].keys() != names.keys() for experts in split):
            raise ValueError("the files of the tensor ranks have different tensors: give the files of one save.")
        state: State = {}
        for name in names:
            whole = self._hf_name(name)
            if any(fused in whole for fused in _FUSED):
                raise ValueError(f"{name} does not fit the options: --qkv_linear and --fuse_qkv are about such names.")
            is_expert = _EXPERTS in name
            parts = [
                torch.cat([each[name] for each in experts]) if is_expert else experts[0][name] for experts in split
            ]
            state[whole] = self._join(whole, parts)
        return state

    def _part(self, name: str, whole: torch.Tensor, rank: int) -> torch.Tensor:
        dim = self._dim(name, whole)
        if dim is None:
            return whole
        if (order := self._head_order(name)) is not None:
            return heads_of_rank(whole, *order, dim, rank, self._ranks)
        return _slice(name, whole, dim, rank, self._ranks, "--tp_size")

    def _join(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        dim = self._dim(name, parts[0])
        if dim is None:
            if not all(torch.equal(parts[0], part) for part in parts):
                raise ValueError(
                    f"{name} is not known as a divided weight, and its values differ between the tensor ranks: "
                    f"override get_partition_dim."
                )
            return parts[0]
        if (order := self._head_order(name, lambda order: are_copies(parts, order, dim))) is not None:
            return heads_of_model(parts, *order, dim)
        return torch.cat([*parts], dim)

    def _dim(self, name: str, tensor: torch.Tensor) -> int | None:
        """The divided dimension; ``None`` for a tensor that each rank has whole, such as the bias of a row."""
        try:
            dim = self._names.get_partition_dim(name)
        except (ValueError, AssertionError):  # The second is of NxD's own subclasses.
            return None
        return dim if dim < tensor.ndim else None

    def _head_order(
        self, name: str, fits: Callable[[list[int]], bool] | None = None
    ) -> tuple[Sequence[int | None], int] | None:
        """The order of heads of a tensor and their number in the model; ``None`` for one without an order.

        NxD 2.29 writes copies of keys and values on trn2 in the order of trn1: the order is the first that ``fits``.
        """
        if self._order is None:
            return None
        queries, keys = self._heads
        if "q_proj" in name or "o_proj" in name:
            return self._order.queries, queries
        if "k_proj" not in name and "v_proj" not in name:
            return None
        backends = sorted(BACKENDS, key=lambda each: each != self._args.hw_backend)
        orders = [self._order.key_values(each) for each in backends]
        if fits is None:
            return orders[0], keys
        fitting = next(filter(fits, orders), None)
        if fitting is None:
            raise ValueError(
                f"the copies of {name} on the tensor ranks differ, with --kv_size_multiplier "
                f"{self._args.kv_size_multiplier}: give the number of the model that was saved."
            )
        return fitting, keys

    def _hf_name(self, name: str) -> str:
        return _with_end(name, self._to_hf)

    def _fuse(self, parts: State, fused: str, members: Sequence[str]) -> None:
        """Join the members of each fused tensor of a rank, in the place of the first."""
        for name in [name for name in parts if members[0] in name]:
            names = [name.replace(members[0], each) for each in members]
            if any(each not in parts for each in names):
                continue
            tensors = [parts.pop(each) for each in names]
            dim = self._dim(self._hf_name(name), tensors[0])
            parts[name.replace(members[0], fused)] = torch.cat(tensors, dim or 0)

    def _split(self, parts: State) -> State:
        """Take the fused tensors of a rank apart."""
        for fused, members in self._fused.items():
            for name in [name for name in parts if fused in name]:
                tensor = parts.pop(name)
                names = [name.replace(fused, each) for each in members]
                dim = self._dim(self._hf_name(names[0]), tensor) or 0
                shares = self._shares(fused, len(members))
                if tensor.shape[dim] % sum(shares):
                    raise ValueError(
                        f"{name} of shape {list(tensor.shape)} does not divide in {sum(shares)} along dimension {dim}."
                    )
                unit = tensor.shape[dim] // sum(shares)
                parts |= dict(zip(names, tensor.split([unit * share for share in shares], dim), strict=True))
        return parts

    def _shares(self, fused: str, members: int) -> list[int]:
        """Relative sizes of the members of a fused tensor."""
        if self._order is None or fused == "gate_up_proj":
            return [1] * members
        copies = len(self._order.key_values(self._args.hw_backend)) // self._ranks
        return [len(self._order.queries) // self._ranks, copies, copies]


def _slice(name: str, whole: torch.Tensor, dim: int, rank: int, ranks: int, option: str) -> torch.Tensor:
    size = whole.shape[dim]
    if size % ranks:
        raise ValueError(
            f"{name} has {size} along dimension {dim}, which {option} {ranks} does not divide. Pad the model first, or "
            f"choose other ranks."
        )
    return whole.narrow(dim, size // ranks * rank, size // ranks)


def _with_end(name: str, ends: Mapping[str, str]) -> str:
    """``name`` with another end, where ``ends`` has one for its last two components."""
    parts = name.split(".")
    end = ".".join(parts[-2:])
    return ".".join([*parts[:-2], ends.get(end, end)])

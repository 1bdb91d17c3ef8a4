"""State dict of a rank's part of a ``Zero1Optimizer``, and its checks when it is loaded."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from nxdpp.counted import counted
from nxdpp.gradients.optimizer.sharded_bucket import Member, ShardedBucket, ShardedPiece, Sharding

_SAME_PARAMETERS = (
    "make the optimizer with the same parameters in the same order. Add or unfreeze parameters as before the save, "
    "then load."
)


class ParameterShard(NamedTuple):
    """Elements ``start`` to ``stop``, in row-major order, of a parameter of ``shape`` that this rank keeps.

    ``parameter`` is its index among the parameters of all groups, ``group`` the index of its group. It has a ``name``
    where the optimizer got named ones.
    """

    parameter: int
    name: str | None
    group: int
    shape: tuple[int, ...]
    start: int
    stop: int


def shard_of(piece: ShardedPiece) -> ParameterShard:
    """The shard whose values ``piece`` has."""
    member = piece.member
    return ParameterShard(
        member.index, member.name, member.group, tuple(member.parameter.shape), piece.start, piece.stop
    )


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """The options of a parameter group, without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def saved_state(
    pieces: Sequence[ShardedPiece],
    buckets: Sequence[ShardedBucket],
    members: Sequence[Member],
    groups: Sequence[dict[str, Any]],
    base: Optimizer,
    sharding: Sharding,
) -> dict[str, Any]:
    """The state dict of ``pieces``, which are in the order of the state of ``base``."""
    masters = {id(piece) for bucket in buckets for piece in bucket.masters()}
    indices = {id(member.parameter): member.index for member in members}
    return {
        "state": {
            number: dict(base.state[piece.tensor]) for number, piece in enumerate(pieces) if piece.tensor in base.state
        },
        "param_groups": [
            {**options_of(group), "params": [indices[id(parameter)] for parameter in group["params"]]}
            for group in groups
        ],
        "shards": [shard_of(piece)._asdict() for piece in pieces],
        "masters": {number: piece.tensor.detach() for number, piece in enumerate(pieces) if id(piece) in masters},
        "data_parallel": {"rank": sharding.rank, "size": sharding.size},
    }


def check_state(
    state_dict: dict[str, Any], pieces: Sequence[ShardedPiece], groups: Sequence[dict[str, Any]], sharding: Sharding
) -> None:
    """Raise ``ValueError`` for the state of another rank, number of ranks or set of parameters."""
    own = {"rank": sharding.rank, "size": sharding.size}
    given = state_dict.get("data_parallel")
    if given != own:
        raise ValueError(
            f"the state is that of data-parallel {given}, and this rank is {own}: each rank loads what it has "
            f"saved, with the same number of data-parallel ranks."
        )
    expected = [shard_of(piece)._asdict() for piece in pieces]
    for ours, theirs in zip(expected, state_dict["shards"], strict=False):
        if {**ours, "name": None} != {**theirs, "shape": tuple(theirs["shape"]), "name": None}:
            raise ValueError(f"the state has {theirs}, and the optimizer {ours} in its place: {_SAME_PARAMETERS}")
    saved = [len(group["params"]) for group in state_dict["param_groups"]]
    present = [len(group["params"]) for group in groups]
    if len(expected) != len(state_dict["shards"]) or saved != present:
        raise ValueError(
            f"the state has {counted(len(state_dict['shards']), 'shard')} in groups of {saved} parameters, "
            f"and the optimizer {len(expected)} in groups of {present}: {_SAME_PARAMETERS}"
        )


def load_state(state_dict: dict[str, Any], pieces: Sequence[ShardedPiece], base: Optimizer) -> None:
    """Give ``base`` the state, and ``pieces`` the master copies, of a checked state dict."""
    groups = base.state_dict()["param_groups"]
    base.load_state_dict({"state": state_dict["state"], "param_groups": groups})
    with torch.no_grad():
        for number, values in state_dict["masters"].items():
            pieces[number].tensor.copy_(values)

"""The parameters of an optimizer's groups in buckets, of which each data-parallel rank keeps a part."""

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from nxdpp.gradients.optimizer.sharded_bucket import Member, ShardedBucket, ShardedPiece, Sharding, make_buckets
from nxdpp.gradients.optimizer.zero1_checks import refuse_meta
from nxdpp.gradients.optimizer.zero1_state import options_of


class ShardedParameters:
    """Buckets of the parameters that an optimizer steps; later ones are added.

    These require a gradient, or have one from before they were frozen: torch's optimizers step them too. ``members``
    are all parameters of the groups in their order. ``layout`` is a hash of the buckets, equal on equal replicas.
    """

    def __init__(self, sharding: Sharding, bucket_bytes: int) -> None:
        self.members: list[Member] = []
        self.buckets: list[ShardedBucket] = []
        self.layout = 0
        self._sharding = sharding
        self._bucket_bytes = bucket_bytes

    def add(self, groups: Sequence[dict[str, Any]]) -> list[ShardedBucket]:
        """Shard the parameters of ``groups`` that require or have a gradient, and were not sharded before.

        Returns the new buckets. Raises ``RuntimeError`` for parameters on the meta device.
        """
        known = {member.index for member in self.sharded()}
        self.members = _members(groups)
        stepped = [m for m in self.members if m.parameter.requires_grad or m.parameter.grad is not None]
        new = [member for member in stepped if member.index not in known]
        if not new:
            return []
        refuse_meta(member.parameter for member in new)
        made = make_buckets(new, self._sharding, self._bucket_bytes)
        text = [
            [b.averaged_dtype, *((m.index, m.group, tuple(m.parameter.shape), m.parameter.dtype) for m in b.members)]
            for b in made
        ]
        self.layout = zlib.crc32(repr(text).encode(), self.layout)
        self.buckets += made
        return made

    def sharded(self) -> Iterator[Member]:
        """The parameters of all buckets."""
        return (member for bucket in self.buckets for member in bucket.members)

    def pieces(self) -> Iterator[ShardedPiece]:
        """This rank's part of all buckets."""
        return (piece for bucket in self.buckets for piece in bucket.pieces)

    def groups_of_pieces(self, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return ``groups``, with this rank's pieces in place of the parameters."""
        pieces: list[list[nn.Parameter]] = [[] for _ in groups]
        for piece in self.pieces():
            pieces[piece.member.group].append(piece.tensor)
        return [{**options_of(group), "params": own} for group, own in zip(groups, pieces, strict=True)]

    def follow(self) -> None:
        """Follow parameters that a program has changed. Raises as ``ShardedBucket.follow`` does."""
        for bucket in self.buckets:
            bucket.follow()


def _members(groups: Sequence[dict[str, Any]]) -> list[Member]:
    members: list[Member] = []
    for number, group in enumerate(groups):
        names: Sequence[str | None] = group.get("param_names", [None] * len(group["params"]))
        for name, parameter in zip(names, group["params"], strict=True):
            members.append(Member(parameter, len(members), number, name))
    return members

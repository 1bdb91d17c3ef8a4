"""Process groups for the P2P transfers of a pipeline, by the rules of their backend.

On gloo that is the pipeline group itself, and shared memory between ranks of one host (``host_link``).

On NCCL, and on other backends whose messages have no tags, each pair of neighbours has a group of two ranks for each
way. A message then waits for no other rank. All other ranks share two groups over the pipeline::

    rank 0 ──0→1──▶ rank 1 ──1→2──▶ rank 2 ──2→0──▶ rank 0 ...      and the same backwards
    rank 0 ───────────── to higher ranks ─────────▶ rank 3          a tensor that skips ranks
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]  # Store is public

from nxdpp.ranks.faults.waits import Wait
from nxdpp.ranks.host_link import HostLink
from nxdpp.ranks.host_links import host_links
from nxdpp.schedules.lowering.transport_rules import RankPair, TransportRules, neighbouring_pairs, rules_of


@dataclass(frozen=True)
class TransferGroups:
    """The groups of one rank; ranks count within its pipeline.

    Attributes:
        rules: the rules of the backend.
        backend: its name, such as ``"gloo"`` or ``"nccl"``.
        pairs: groups of two ranks, by source and destination.
        to_lower: group over the pipeline for messages of other ranks, to lower ranks.
        to_higher: group over the pipeline for messages of other ranks, to higher ranks.
        links: shared memory with the ranks of this host, which takes the place of their groups; on gloo.
    """

    rules: TransportRules
    backend: str
    pairs: Mapping[RankPair, ProcessGroup]
    to_lower: ProcessGroup
    to_higher: ProcessGroup
    links: Mapping[int, HostLink]

    @property
    def has_tags(self) -> bool:
        """``True`` if messages have tags; otherwise they are matched by their order."""
        return self.rules.has_tags

    def between(self, source: int, destination: int) -> tuple[ProcessGroup, int, int]:
        """Return the group of messages from ``source`` to ``destination``, and the numbers of both in it."""
        group = self.pairs.get((source, destination))
        if group is not None:
            return group, int(source > destination), int(destination > source)
        return self.to_higher if destination > source else self.to_lower, source, destination

    @property
    def all(self) -> list[ProcessGroup]:
        """Each group once."""
        return list(dict.fromkeys([*self.pairs.values(), self.to_lower, self.to_higher]))


def build_transfer_groups(
    backend: str,
    pipelines: list[list[int]],
    pipeline_group: ProcessGroup,
    device: torch.device,
    store: Store,
    limit: timedelta | None = None,
) -> TransferGroups:
    """Create the groups of all pipelines; collective over all ranks, which make them in the same order.

    Args:
        backend: its name, such as ``"gloo"`` or ``"nccl"``.
        pipelines: the global ranks of each pipeline.
        pipeline_group: this rank's pipeline group.
        device: device of the messages.
        store: store of this start.
        limit: for each operation; torch's own limit if ``None``.

    Raises ``ValueError`` for an unknown value of ``NXDPP_P2P``.
    """
    rules = rules_of(backend)
    if not rules.pair_groups:
        links = host_links(pipelines, dist.get_rank(), store)
        return TransferGroups(rules, backend, {}, pipeline_group, pipeline_group, links)
    rank = dist.get_rank(pipeline_group)
    to_lower, to_higher = (own_group(pipelines, backend, limit) for _ in range(2))
    pairs = {}
    for source, destination in neighbouring_pairs(len(pipelines[0])):
        members = [[pipeline[source], pipeline[destination]] for pipeline in pipelines]
        group = own_group(members, backend, limit)
        if rank in (source, destination):
            pairs[source, destination] = group
    groups = TransferGroups(rules, backend, pairs, to_lower, to_higher, {})
    _first_exchange(groups, rank, device)
    return groups


def communicators(ranks: int, replicas: int, tensor: int = 1) -> int:
    """Return the most NCCL communicators of a rank: for each neighbour and way, the pipeline, and the replicas.

    ``tensor`` is the tensor-parallel size, whose group has one too. Two more, of messages that skip ranks, count where
    there are ranks that are not neighbours.
    """
    neighbours = min(ranks - 1, 2)
    return 2 * neighbours + (ranks > 1) + (replicas > 1) + (tensor > 1) + 2 * (ranks > 3)


def own_group(lists_of_ranks: list[list[int]], backend: str | None, limit: timedelta | None = None) -> ProcessGroup:
    """Create a group for each list, and return this rank's one, if it has one.

    ``backend=None`` is that of the world. An operation may take the time ``limit``, torch's own limit if ``None``.
    """
    with unbound():
        group, _ = dist.new_subgroups_by_enumeration(lists_of_ranks, backend=backend, timeout=limit)
    return group  # type: ignore[no-any-return]  # torch gives no type


@contextmanager
def unbound() -> Iterator[None]:
    """Make groups without the communicator of the world in the block.

    Torch splits it for a new group where a caller has started the world with ``device_id``. All ranks of the world must
    take part in a split, also those that are not in the group.
    """
    world = dist.group.WORLD
    assert world is not None
    device = world.bound_device_id
    if device is not None:
        world.bound_device_id = None
    try:
        yield
    finally:
        if device is not None:
            world.bound_device_id = device


def _first_exchange(groups: TransferGroups, rank: int, device: torch.device) -> None:
    """Exchange a first message in each pair. NCCL makes the communicator of two ranks there, and stops their hosts."""
    for source, destination in groups.pairs:
        group, from_rank, to_rank = groups.between(source, destination)
        message = torch.zeros(1, device=device)
        with Wait("first message", group):
            (group.send([message], to_rank, 0) if rank == source else group.recv([message], from_rank, 0)).wait()

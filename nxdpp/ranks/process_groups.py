"""Process groups of this rank: the device mesh, and the extra groups of the pipeline dimension.

Hosts of a job may have environments of their own: all ranks must have the same versions of torch and transformers.
"""

from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from importlib import metadata

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Store, distributed_c10d  # type: ignore[attr-defined]  # Store is public
from torch.distributed.device_mesh import DeviceMesh

from nxdpp.devices.kinds import kind_of
from nxdpp.ground.torch_names import CLEAR_SHARDING_CACHE
from nxdpp.ranks.faults.timeouts import NO_LIMITS, Timeouts
from nxdpp.ranks.faults.waits import Wait
from nxdpp.ranks.rank_mesh import DIMENSIONS, RankMesh
from nxdpp.ranks.store_exchange import StoreExchange
from nxdpp.ranks.transfer_groups import TransferGroups, build_transfer_groups, own_group, unbound


@dataclass(frozen=True)
class ProcessGroups:
    """The groups of a running job.

    ``mesh`` has the shape (pipeline, data, tensor). ``control_groups`` are gloo groups over this rank's groups, by
    dimension. ``world`` is the default process group at the time of construction. ``started_world`` is ``True`` if
    nxdpp started ``torch.distributed``. The job ends after ``timeouts`` if no rank has moved. ``shard_size`` ranks of a
    data group share a shard. ``expert_size`` of them share the experts of a layer; ``expert_groups`` are this rank's
    groups of these ranks and of the ranks with the same experts, if there are several. ``context_size`` of them share
    each sequence; ``context_groups`` are this rank's groups of these, of the ranks with the same part of sequences, and
    of the first ones between their hosts.
    """

    rank_mesh: RankMesh
    mesh: DeviceMesh
    device: torch.device
    control_groups: dict[str, ProcessGroup]
    transfer_groups: TransferGroups
    world: ProcessGroup
    started_world: bool
    exchange: StoreExchange
    timeouts: Timeouts = NO_LIMITS
    shard_size: int = 1
    expert_size: int = 1
    expert_groups: tuple[ProcessGroup, ...] = ()
    context_size: int = 1
    context_groups: tuple[ProcessGroup, ...] = ()
    _data_parts: dict[int, ProcessGroup] = field(default_factory=dict)

    def rank(self, dimension: str) -> int:
        """This rank's index along ``dimension``."""
        return self._ranks[dimension]

    @cached_property
    def _ranks(self) -> dict[str, int]:
        return {dimension: self.mesh.get_local_rank(dimension) for dimension in DIMENSIONS}

    @cached_property
    def own_group(self) -> ProcessGroup:
        """Group of only this rank. Where each dimension has several ranks, this rank makes it at the first use."""
        for dimension in DIMENSIONS:
            if self.rank_mesh.size(dimension) == 1:
                return self.mesh.get_group(dimension)
        return self._group_of([dist.get_rank()])

    @cached_property
    def model_group(self) -> ProcessGroup:
        """Group of the pipeline and tensor ranks of this rank's replica; its first use is collective over it."""
        for one, other in (("pipeline", "tensor"), ("tensor", "pipeline")):
            if self.rank_mesh.size(one) == 1:
                return self.mesh.get_group(other)
        return self._group_of(self.rank_mesh.models()[self.rank("data")])

    def part_of_data_group(self, count: int) -> ProcessGroup:
        """Group of consecutive ranks of the data group, one of ``count``; its first use is collective over it."""
        if count not in self._data_parts:
            ranks = dist.get_process_group_ranks(self.mesh.get_group("data"))
            size = len(ranks) // count
            first = self.rank("data") // size * size
            self._data_parts[count] = self._group_of(ranks[first : first + size])
        return self._data_parts[count]

    def _group_of(self, ranks: list[int]) -> ProcessGroup:
        """Make the group of ``ranks``; collective over them."""
        with Wait("new process group", ranks=ranks), unbound():
            # torch_xla replaces ``dist.new_group`` by one with fewer arguments.
            group = distributed_c10d.new_group(
                ranks, use_local_synchronization=True, timeout=self.timeouts.of_operations
            )
        assert isinstance(group, ProcessGroup)
        return group

    @property
    def has_shards(self) -> bool:
        """``True`` once ``shard_mesh`` is in use, on all ranks."""
        return "shard_mesh" in vars(self)

    @cached_property
    def shard_mesh(self) -> DeviceMesh:
        """Mesh of the data group, or of its replicas of shards and its shards; its first use is collective over it."""
        data = self.mesh["data"]
        size = self.shard_size
        if size == data.size():
            return data
        ranks = torch.tensor(dist.get_process_group_ranks(self.mesh.get_group("data")), device="cpu").view(-1, size)
        own = self.rank("data")
        # All ranks make the groups of shards first.
        shard = self.part_of_data_group(len(ranks))
        replicas = self._group_of(ranks[:, own % size].tolist())
        return DeviceMesh.from_group(
            [replicas, shard], data.device_type, mesh=ranks, mesh_dim_names=("replica", "shard")
        )

    @cached_property
    def expert_shard_mesh(self) -> DeviceMesh:
        """Mesh of the ranks with the same experts."""
        return DeviceMesh.from_group(self.expert_groups[1], self.mesh.device_type, mesh_dim_names=("shard",))

    def destroy(self) -> None:
        """Destroy the groups, or the whole world if nxdpp started it; collective over all ranks."""
        for link in self.transfer_groups.links.values():
            link.close()
        if self.has_shards:
            # Results of torch's DTensors are kept by the ranks of a mesh: later groups of the same ranks have others.
            CLEAR_SHARDING_CACHE()
        if self.started_world:
            dist.destroy_process_group()
            return
        groups = [
            *self.mesh.get_all_groups(),
            *self.control_groups.values(),
            *self.transfer_groups.all,
            *self._data_parts.values(),
            *self.expert_groups,
            *self.context_groups,
            *(self.shard_mesh.get_all_groups() if self.has_shards else ()),
            *(vars(self)[name] for name in ("own_group", "model_group") if name in vars(self)),
        ]
        for group in dict.fromkeys(groups):
            if group is not self.world:
                dist.destroy_process_group(group)


def build_groups(
    rank_mesh: RankMesh,
    started_world: bool,
    device: torch.device,
    store: Store,
    timeouts: Timeouts = NO_LIMITS,
    shard_size: int | None = None,
    expert_size: int = 1,
    context_size: int = 1,
) -> ProcessGroups:
    """Create the groups, on all ranks the same ones in the same order; collective over all ranks.

    Raises ``ValueError`` for a ``rank_mesh`` that differs from the first rank's, and ``RuntimeError`` for
    other versions of libraries.
    """
    check_same_versions(store)
    _check_same_mesh(rank_mesh, shard_size, expert_size, context_size, store)
    world, limit = dist.group.WORLD, timeouts.of_operations
    assert world is not None
    backend = kind_of(device.type).backend
    groups = [
        world if len(rank_mesh.groups(dimension)) == 1 else own_group(rank_mesh.groups(dimension), None, limit)
        for dimension in DIMENSIONS
    ]
    # A mesh on an XLA device would make groups of XLA's own collectives.
    on = "cpu" if backend == "gloo" else device.type
    mesh = DeviceMesh.from_group(groups, on, mesh=rank_mesh.ranks, mesh_dim_names=DIMENSIONS)
    control_groups = {dimension: mesh.get_group(dimension) for dimension in DIMENSIONS}
    for dimension in DIMENSIONS if backend != "gloo" else ():
        if dimension == "pipeline" or rank_mesh.size(dimension) > 1:
            control_groups[dimension] = own_group(rank_mesh.groups(dimension), "gloo", limit)
    transfer_groups = build_transfer_groups(
        backend, rank_mesh.groups("pipeline"), mesh.get_group("pipeline"), device, store, limit
    )
    # Of their own: messages of tokens and averages of gradients may be in flight at one time.
    shared = (rank_mesh.consecutive_groups, rank_mesh.strided_groups) if expert_size > 1 else ()
    expert_groups = tuple(own_group(groups_of(expert_size), None, limit) for groups_of in shared)
    context_groups = _context_groups(rank_mesh, context_size, backend, limit) if context_size > 1 else ()
    _wait_for_all_ranks(dist.get_world_size(), store)
    exchange = StoreExchange(store, dist.get_rank(), dist.get_world_size())
    return ProcessGroups(
        rank_mesh,
        mesh,
        device,
        control_groups,
        transfer_groups,
        world,
        started_world,
        exchange,
        timeouts,
        shard_size or rank_mesh.data,
        expert_size,
        expert_groups,
        context_size,
        context_groups,
    )


def _context_groups(rank_mesh: RankMesh, size: int, backend: str, limit: timedelta) -> tuple[ProcessGroup, ...]:
    groups = rank_mesh.consecutive_groups(size)
    context = own_group(groups, None, limit)
    data = own_group(rank_mesh.strided_groups(size), None, limit)
    return context, data, context if backend == "gloo" else own_group(groups, "gloo", limit)


def _check_same_mesh(
    rank_mesh: RankMesh, shard_size: int | None, expert_size: int, context_size: int, store: Store
) -> None:
    """Raise before a group is made: ranks would wait for each other in different groups."""
    values = {
        "tensor_model_parallel_size": rank_mesh.tensor,
        "pipeline_model_parallel_size": rank_mesh.pipeline,
        "order": rank_mesh.order,
        "data_parallel_shard_size": shard_size,
        "expert_model_parallel_size": expert_size,
        "context_parallel_size": context_size,
    }
    first, theirs, ours = _differences("nxdpp_mesh", [f"{name}={value}" for name, value in values.items()], store)
    if theirs:
        raise ValueError(
            f"rank {first} has called initialize_model_parallel with {', '.join(theirs)}, and rank {dist.get_rank()} "
            f"with {', '.join(ours)}. Give all ranks the same."
        )


def _differences(key: str, own: list[str], store: Store) -> tuple[str, list[str], list[str]]:
    """Return the first rank that has asked for ``key``, and its texts and ``own`` where they differ."""
    told = store.compare_set(key, "", "|".join([str(dist.get_rank()), *own])).decode()
    first, *theirs = told.split("|")
    pairs = [pair for pair in zip(theirs, own, strict=True) if pair[0] != pair[1]]
    return first, [there for there, _ in pairs], [here for _, here in pairs]


def _wait_for_all_ranks(world_size: int, store: Store) -> None:
    """Wait until all ranks have made their groups.

    gloo connects all pairs of a group. A rank that ended earlier would close connections that others still wait for.
    """
    if store.add("nxdpp_groups", 1) == world_size:
        store.set("nxdpp_groups_made", "")
    with Wait("new process groups"):
        store.wait(["nxdpp_groups_made"])


def check_same_versions(store: Store) -> None:
    """Raise ``RuntimeError`` for versions that differ from the first rank's; all ranks call it."""
    own = [f"torch {torch.__version__}", f"transformers {_version('transformers')}"]
    first, theirs, ours = _differences("nxdpp_versions", own, store)
    if theirs:
        raise RuntimeError(
            f"rank {first} has {' and '.join(theirs)}, and rank {dist.get_rank()} has {' and '.join(ours)}: they may "
            f"compute different numbers. Install the same versions on all hosts."
        )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(none)"

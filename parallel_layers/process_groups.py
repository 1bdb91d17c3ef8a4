"""Process groups of this rank: the device mesh, and the extra groups of the pipeline dimension."""

from dataclasses import dataclass
from functools import cached_property
from itertools import count

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]  # Store is public
from torch.distributed.device_mesh import DeviceMesh

from nxdpp.parallel_layers.store_exchange import StoreExchange
from nxdpp.parallel_layers.transfer_groups import TransferGroups, build_transfer_groups, own_group
from nxdpp.schedules.lowering.transport_rules import RULES

DIMENSIONS = ("pipeline", "data", "tensor")

# Number of times that this process has built groups, equal on all ranks.
_built = count()
_compared = count()


@dataclass(frozen=True)
class ProcessGroups:
    """The groups of a running job.

    Attributes:
        mesh: device mesh of shape (pipeline, data, tensor).
        device: this rank's device.
        control_group: gloo group over this rank's pipeline group.
        replica_control_group: gloo group over this rank's data group.
        transfer_groups: groups for the P2P transfers of this rank's pipeline.
        world: the default process group at the time of construction.
        started_world: ``True`` if nxdpp started ``torch.distributed``.
        exchange: exchange of small values between all ranks.
    """

    mesh: DeviceMesh
    device: torch.device
    control_group: ProcessGroup
    replica_control_group: ProcessGroup
    transfer_groups: TransferGroups
    world: ProcessGroup
    started_world: bool
    exchange: StoreExchange

    def size(self, dimension: str) -> int:
        """Number of ranks along ``dimension``."""
        return self.mesh.size(DIMENSIONS.index(dimension))

    def rank(self, dimension: str) -> int:
        """This rank's index along ``dimension``."""
        return self.mesh.get_local_rank(dimension)

    @property
    def mesh_of_ranks(self) -> torch.Tensor:
        """The global ranks, int64 of shape (pipeline, data, tensor)."""
        return self.mesh.mesh

    @cached_property
    def model_group(self) -> ProcessGroup:
        """Group of the pipeline and tensor ranks of this rank's replica; its first use is collective over it."""
        for one, other in (("pipeline", "tensor"), ("tensor", "pipeline")):
            if self.size(one) == 1:
                return self.mesh.get_group(other)
        ranks = self.mesh_of_ranks[:, self.rank("data")].flatten().tolist()
        group = dist.new_group(ranks, use_local_synchronization=True)
        assert isinstance(group, ProcessGroup)
        return group

    def destroy(self) -> None:
        """Destroy the groups, or the whole world if nxdpp started it; collective over all ranks."""
        if self.started_world:
            dist.destroy_process_group()
            return
        groups = [
            *self.mesh.get_all_groups(),
            self.control_group,
            self.replica_control_group,
            *self.transfer_groups.all,
            *([self.model_group] if "model_group" in vars(self) else []),
        ]
        for group in dict.fromkeys(groups):
            if group is not self.world:
                dist.destroy_process_group(group)


def build_groups(
    tensor: int, pipeline: int, world_size: int, started_world: bool, device: torch.device, store: Store
) -> ProcessGroups:
    """Create the groups, on all ranks the same ones in the same order; collective over all ranks.

    Raises ``ValueError`` for other sizes than those of the rank that came first.
    """
    _check_sizes_of_ranks(tensor, pipeline, store)
    ranks = torch.arange(world_size).view(pipeline, world_size // (tensor * pipeline), tensor)
    mesh = DeviceMesh(device.type, ranks, mesh_dim_names=DIMENSIONS)
    pipelines = ranks_along(ranks, "pipeline")
    pipeline_group = mesh.get_group("pipeline")
    backend = "nccl" if device.type == "cuda" else "gloo"
    control_group, replica_control_group = pipeline_group, mesh.get_group("data")
    if backend == "nccl":
        control_group = own_group(pipelines, "gloo")
        if len(ranks[0]) > 1:
            replica_control_group = own_group(ranks_along(ranks, "data"), "gloo")
    transfer_groups = build_transfer_groups(RULES[backend], backend, pipelines, pipeline_group, device)
    world = dist.group.WORLD
    assert world is not None
    _wait_for_all_ranks(world_size, store)
    exchange = StoreExchange(store, dist.get_rank(), world_size)
    return ProcessGroups(
        mesh, device, control_group, replica_control_group, transfer_groups, world, started_world, exchange
    )


def _check_sizes_of_ranks(tensor: int, pipeline: int, store: Store) -> None:
    """Raise before a group is made: ranks would wait for each other in different groups."""
    own = f"tensor_model_parallel_size={tensor}, pipeline_model_parallel_size={pipeline}"
    first = store.compare_set(f"nxdpp_sizes_{next(_compared)}", "", own).decode()
    if first != own:
        raise ValueError(f"another rank has {first}, and rank {dist.get_rank()} {own}. Give all ranks the same sizes.")


def _wait_for_all_ranks(world_size: int, store: Store) -> None:
    """Wait until all ranks have made their groups.

    gloo connects all pairs of a group. A rank that ended earlier would close connections that others still wait for.
    """
    key = f"nxdpp_groups_{next(_built)}"
    if store.add(f"{key}_ranks", 1) == world_size:
        store.set(key, "made")
    store.wait([key])


def ranks_along(mesh_of_ranks: torch.Tensor, dimension: str) -> list[list[int]]:
    """Global ranks of every group along ``dimension`` of a mesh of shape (pipeline, data, tensor)."""
    index = DIMENSIONS.index(dimension)
    groups: list[list[int]] = mesh_of_ranks.movedim(index, -1).reshape(-1, mesh_of_ranks.shape[index]).tolist()
    return groups

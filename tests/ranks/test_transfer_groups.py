"""Groups of the P2P transfers under the rules of NCCL, over gloo."""

import pytest
import torch
import torch.distributed as dist

from nxdpp import parallel_state
from nxdpp.ranks import transfer_groups
from nxdpp.schedules.lowering.transport_rules import NCCL, neighbouring_pairs
from tests.support.nccl_rules import use_nccl_rules
from tests.support.run_ranks import run_ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 64])
def test_neighbours_are_those_of_a_ring(ranks: int) -> None:
    pairs = neighbouring_pairs(ranks)

    assert len(set(pairs)) == len(pairs)
    assert set(pairs) == {
        pair
        for rank in range(ranks)
        for pair in ((rank, (rank + 1) % ranks), ((rank + 1) % ranks, rank))
        if pair[0] != pair[1]
    }


def _groups(rank: int, pipeline: int) -> dict[str, object]:
    use_nccl_rules()
    exchanged: list[tuple[int, int]] = []
    first_exchange = transfer_groups._first_exchange

    def noting(groups: transfer_groups.TransferGroups, rank: int, device: torch.device) -> None:
        exchanged.extend(groups.pairs)
        first_exchange(groups, rank, device)

    transfer_groups._first_exchange = noting
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=pipeline)
    groups = parallel_state.get_pipeline_transfer_groups()
    own = parallel_state.get_pipeline_model_parallel_rank()
    # A message to each other rank, in one order.
    received = {}
    for source in range(pipeline):
        for destination in range(pipeline):
            if own not in (source, destination) or source == destination:
                continue
            group, from_rank, to_rank = groups.between(source, destination)
            message = torch.tensor([float(source)])
            if own == source:
                group.send([message], to_rank, 0).wait()
            else:
                message.zero_()
                group.recv([message], from_rank, 0).wait()
                received[source] = message.item()
    described = {
        "rules": groups.rules,
        "exchanged": exchanged,
        "members": {pair: dist.get_process_group_ranks(group) for pair, group in groups.pairs.items()},
        "distinct": len(set(groups.all)) == len(groups.pairs) + 2,
        "others": [dist.get_process_group_ranks(group) for group in (groups.to_lower, groups.to_higher)],
        "received": received,
    }
    parallel_state.destroy_model_parallel()
    return described


def test_each_pair_of_neighbours_has_a_group_for_each_way() -> None:
    """Two replicas: the ranks of a pipeline are those of every second process."""
    world, pipeline, replicas = 6, 3, 2
    for process, described in enumerate(run_ranks(world, _groups, pipeline)):
        rank, replica = divmod(process, replicas)
        pairs = [pair for pair in neighbouring_pairs(pipeline) if rank in pair]
        assert described["rules"] == NCCL
        assert described["exchanged"] == pairs, "a first exchange in each, in one order"
        assert described["members"] == {pair: sorted(r * replicas + replica for r in pair) for pair in pairs}
        assert described["distinct"]
        assert described["others"] == [[r * replicas + replica for r in range(pipeline)]] * 2
        assert described["received"] == {source: float(source) for source in range(pipeline) if source != rank}

"""Memory of communicators and messages on CUDA, and its part of a rank's limit."""

import pytest
import torch

from nxdpp.pipeline.partition.balanced_partition import COMMUNICATOR_BYTES, MESSAGES_HELD, CostPolicy, transport_bytes
from nxdpp.schedules.chosen import ChosenSchedule
from nxdpp.tracing.costs.count import count_costs
from nxdpp.tracing.graph.trace import TracingOptions, trace_for
from tests.support.plain_models import WIDTH, Block, Skips

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_communicators_and_messages_count_on_cuda_alone() -> None:
    model, batch = Skips(), {"x": torch.zeros(2, WIDTH)}
    traced = trace_for(model, batch, TracingOptions((Block,)))
    costs = count_costs(traced, model, batch, CPU)
    assert transport_bytes(traced, costs, CPU, 4, 2) == 0
    message = 2 * WIDTH * 4
    assert transport_bytes(traced, costs, CUDA, 4, 2) == 8 * COMMUNICATOR_BYTES + MESSAGES_HELD * message

    def cuts(limit: int, device: torch.device) -> list[str]:
        return CostPolicy(model, batch, "balanced", ChosenSchedule("1f1b", 2, 2, 1), limit).cuts(traced, costs, device)

    limit = 3 * COMMUNICATOR_BYTES
    assert len(cuts(limit, CPU)) == 1
    with pytest.raises(ValueError, match=r"limit of 0\.293 GiB per rank: .* on rank \d, 0\.293 GiB for communicators"):
        cuts(limit, CUDA)
    # The remedy: a higher limit.
    assert cuts(limit + 2**20, CUDA) == cuts(limit, CPU)

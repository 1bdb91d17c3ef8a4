"""The average that begins during backwards: the order of its messages."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from nxdpp.gradients import buckets, overlapped_average
from nxdpp.gradients.average_plan import LastBackward
from nxdpp.gradients.overlapped_average import OverlappedAverage
from nxdpp.ranks import parallel_state
from tests.support.run_ranks import run_ranks

COUNT = 6


def gradient(rank: int, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + index)
    return torch.randn((index + 1, 3), generator=generator)


def parameters(rank: int, missing: tuple[int, ...] = ()) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.zeros(index + 1, 3)) for index in range(COUNT)]
    for index, parameter in enumerate(made):
        if index not in missing:
            parameter.grad = gradient(rank, index)
    return made


def equal(found: list[torch.Tensor | None], expected: Callable[[int], torch.Tensor]) -> None:
    assert all(each is not None and torch.equal(each, expected(index)) for index, each in enumerate(found))


def orders_of_messages(rank: int) -> list[list[str]]:
    """The starts and the waits of two steps, where messages seem to arrive at once on rank 0, and late on rank 1."""
    groups = parallel_state.get_data_parallel_group(), parallel_state.get_replica_control_group()
    average = OverlappedAverage(*groups)
    average._waits_stop_streams = True
    own = parameters(rank)
    last = [LastBackward(0, own[:3]), LastBackward(1, own[3:])]
    orders: list[list[str]] = []
    all_reduce = dist.all_reduce

    class Noted:
        """A message that is noted."""

        def __init__(self, work: dist.Work, number: int) -> None:
            self._work, self._number = work, number

        def is_completed(self) -> bool:
            return rank == 0

        def wait(self) -> None:
            orders[-1].append(f"wait for {self._number}")
            self._work.wait()

    def noted(tensor: torch.Tensor, *positional: Any, async_op: bool = False, **others: Any) -> Any:
        if not async_op:
            return all_reduce(tensor, *positional, **others)
        number = sum("start" in each for each in orders[-1])
        orders[-1].append(f"start {number}")
        return Noted(all_reduce(tensor, async_op=True, **others), number)

    for _ in range(2):
        orders.append([])
        for index, parameter in enumerate(own):
            parameter.grad = gradient(rank, index)
        average.begin(own, last, [], lambda order: lambda: True)
        with mock.patch.object(dist, "all_reduce", noted):
            for stage in range(2):
                average.before_last(stage)
                average.after_last(stage)
            average.finish()
        equal([p.grad for p in own], lambda index: gradient(0, index) / 2 + gradient(1, index) / 2)
    return orders


def orders_with_little_memory(rank: int) -> list[list[str]]:
    parallel_state.initialize_model_parallel()
    with (
        mock.patch.object(buckets, "BUCKET_BYTES", 130),
        mock.patch.object(overlapped_average, "_COPIED_BYTES", 50),
    ):
        return orders_of_messages(rank)


def test_where_a_wait_stops_a_stream_all_replicas_start_and_wait_in_one_order() -> None:
    """With one hardware queue, ranks whose order follows from what has arrived would wait in a circle."""
    first, second = run_ranks(2, orders_with_little_memory)
    assert first == second
    # Memory is freed by a wait, and the later buckets overlap too.
    assert first[1].index("wait for 0") < first[1].index("start 1") < first[1].index("start 2")

"""Several stages per rank: microbatches in flight, memory after a step, order of messages."""

import gc
from collections import defaultdict
from typing import Any

import pytest
import torch

from nxdpp import parallel_state
from nxdpp.pipeline.p2p.transport import Direction, Transport
from nxdpp.pipeline.runtime.stage_runner import StageRunner
from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.simulate import in_flight_peaks
from tests.pipeline.runtime.scheduled_models import Chain, Skips, make, rows, v_schedule, wrap
from tests.support.run_ranks import run_ranks

MICROBATCHES = 9


def start(stages: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=stages)


def watch(rank: int) -> dict[str, tuple[int, int, list[str]]]:
    """For each family: the most microbatches in flight, the most receives posted and not used, tensors left after."""
    start(4)
    # Count in wrappers of the runner's forward and the transport's receive.
    runners: set[StageRunner] = set()
    most_in_flight = posted = most_posted = 0
    forward, post = StageRunner.forward, Transport.post_receive

    def watching_forward(self: StageRunner, microbatch: int) -> None:
        nonlocal most_in_flight
        runners.add(self)
        forward(self, microbatch)
        most_in_flight = max(most_in_flight, sum(len(runner._in_flight) for runner in runners))

    def watching_post(self: Transport, *args: Any) -> Any:
        nonlocal posted, most_posted
        arrive = post(self, *args)
        posted += 1
        most_posted = max(most_posted, posted)

        def arrived() -> torch.Tensor:
            nonlocal posted
            posted -= 1
            return arrive()

        return arrived

    StageRunner.forward = watching_forward  # type: ignore[method-assign]
    Transport.post_receive = watching_post  # type: ignore[method-assign, assignment]
    # Run two steps of each family. The counts are those of the second one.
    seen = {}
    for name, family in FAMILIES.items():
        wrapped = wrap(make(Chain, 4 * family.default_chunks), MICROBATCHES, schedule=name)
        x = rows(MICROBATCHES)
        wrapped.run_train(x=x)
        wrapped.zero_grad()
        gc.collect()
        before = {id(tensor) for tensor in gc.get_objects() if isinstance(tensor, torch.Tensor)}
        most_in_flight = most_posted = 0
        wrapped.run_train(x=x)
        wrapped.zero_grad()
        gc.collect()
        after = [t for t in gc.get_objects() if isinstance(t, torch.Tensor) and id(t) not in before]
        seen[name] = most_in_flight, most_posted, [f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in after]
        runners.clear()
    return seen


@pytest.mark.cpu_only("hashes of inputs on a device are read in the next step")
def test_microbatches_in_flight_are_as_simulated_and_no_tensor_is_alive_after_a_step() -> None:
    ranks = run_ranks(4, watch)
    for name, family in FAMILIES.items():
        assert [seen[name][0] for seen in ranks] == in_flight_peaks(family.build(4, MICROBATCHES)), name
        # Each stage's receives are posted two compute actions ahead, or as early as those sent after them.
        assert all(seen[name][1] <= 6 * family.default_chunks for seen in ranks), (name, [s[name][1] for s in ranks])
        assert all(seen[name][2] == [] for seen in ranks), name


def record_order(rank: int) -> list[tuple[dict[Any, list[int]], dict[Any, list[int]]]]:
    """The tags sent to and received from each rank, in order, over a first step and a second, for each placement."""
    start(2)
    recorded = []
    send, post = Transport.send, Transport.post_receive
    for kind, schedule in (
        (Chain, "interleaved"),
        (Skips, "interleaved"),
        (Skips, "zb-v"),
        (Skips, "v-min"),
        (Skips, v_schedule(2, 5)),
        (Skips, v_schedule(2, 1)),
    ):
        sent: defaultdict[Any, list[int]] = defaultdict(list)
        received: defaultdict[Any, list[int]] = defaultdict(list)

        def recording_send(
            self: Transport, tensor: Any, peer: int, direction: Direction, tag: int, to: Any = sent
        ) -> Any:
            to[rank, peer, direction.name].append(tag)
            return send(self, tensor, peer, direction, tag)

        def recording_post(
            self: Transport, layout: Any, peer: int, direction: Direction, tag: int, to: Any = received
        ) -> Any:
            to[peer, rank, direction.name].append(tag)
            return post(self, layout, peer, direction, tag)

        Transport.send, Transport.post_receive = recording_send, recording_post  # type: ignore[method-assign, assignment]
        microbatches = 1 if schedule == v_schedule(2, 1) else 5
        wrapped = wrap(make(kind, 4), microbatches, schedule=schedule)
        for _ in range(2):
            wrapped.run_train(x=rows(microbatches))
        recorded.append((dict(sent), dict(received)))
    return recorded


def test_messages_are_received_in_the_order_in_which_they_are_sent() -> None:
    """NCCL has no tags: it matches messages by their order, in a first step too."""
    for of_ranks in zip(*run_ranks(2, record_order), strict=True):
        sent = {key: tags for rank in of_ranks for key, tags in rank[0].items()}
        received = {key: tags for rank in of_ranks for key, tags in rank[1].items()}
        assert len(sent) == 4, "activations and gradients, in both directions"
        assert sent == received

"""Several stages a rank: what is live, what outlives a step, in which order messages go, what failures say."""

import gc
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from nxdpp import parallel_state
from nxdpp.pipeline.p2p.transport import Direction, Transport
from nxdpp.pipeline.runtime.stage_runner import StageRunner
from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.simulate import live_peaks
from tests.pipeline.runtime.scheduled_models import Chain, Skips, make, rows, v_schedule, wrap
from tests.support.run_program import run_program
from tests.support.run_ranks import run_ranks

MICROBATCHES = 9


def start(stages: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=stages)


def watch(rank: int) -> dict[str, tuple[int, int, list[str]]]:
    """For each family: the most live microbatches, the most receives posted and not used, and what is left after."""
    start(4)
    runners: set[StageRunner] = set()
    most_live = posted = most_posted = 0
    forward, post = StageRunner.forward, Transport.post_receive

    def watching_forward(self: StageRunner, microbatch: int) -> None:
        nonlocal most_live
        runners.add(self)
        forward(self, microbatch)
        most_live = max(most_live, sum(len(runner._live) for runner in runners))

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
    seen = {}
    for name, family in FAMILIES.items():
        wrapped = wrap(make(Chain, 4 * family.default_chunks), MICROBATCHES, schedule=name)
        x = rows(MICROBATCHES)
        wrapped.run_train(x=x)
        wrapped.zero_grad()
        gc.collect()
        before = {id(tensor) for tensor in gc.get_objects() if isinstance(tensor, torch.Tensor)}
        most_live = most_posted = 0
        wrapped.run_train(x=x)
        wrapped.zero_grad()
        gc.collect()
        after = [t for t in gc.get_objects() if isinstance(t, torch.Tensor) and id(t) not in before]
        seen[name] = most_live, most_posted, [f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in after]
        runners.clear()
    return seen


def test_what_is_live_is_what_the_simulator_says_and_nothing_outlives_a_step() -> None:
    ranks = run_ranks(4, watch)
    for name, family in FAMILIES.items():
        assert [seen[name][0] for seen in ranks] == live_peaks(family.build(4, MICROBATCHES)), name
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
    """Where there are no tags, as on NCCL, that is all that tells them apart; in a first step, too."""
    for of_ranks in zip(*run_ranks(2, record_order), strict=True):
        sent = {key: tags for rank in of_ranks for key, tags in rank[0].items()}
        received = {key: tags for rank in of_ranks for key, tags in rank[1].items()}
        assert len(sent) == 4, "both ways in both directions"
        assert sent == received


PROGRAM = str(Path(__file__).with_name("failing_stage.py"))


@pytest.mark.parametrize(
    ("schedule", "where", "words"),
    [
        ("interleaved", "backward", "stage 3, backward of microbatch 1 (action 3B1)"),
        ("zb-v", "backward", "stage 2, input gradient of microbatch 1 (action 2I1)"),
    ],
)
def test_a_failure_names_the_stage_of_the_rank(schedule: str, where: str, words: str) -> None:
    ended = run_program(PROGRAM, [schedule, where], ranks=2, timeout=120)
    failed = re.search(r"fails at (\S+)", ended.output)
    assert failed, ended.output
    assert all(ended.codes), ended.output
    assert ended.time - float(failed[1]) < 10, ended.output
    assert f"in the pipeline: {words}" in ended.output, ended.output
    assert "ArithmeticError: the layer broke" in ended.output, ended.output

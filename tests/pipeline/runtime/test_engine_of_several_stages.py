"""Several stages per rank: microbatches in flight, and memory after a step."""

import gc
from typing import Any

import pytest
import torch

from nxdpp import parallel_state
from nxdpp.pipeline.p2p.transport import Transport
from nxdpp.pipeline.runtime.stage_runner import StageRunner
from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.simulate import in_flight_peaks
from tests.pipeline.runtime.scheduled_models import Chain, Tied, make, rows, wrap
from tests.support.run_ranks import run_ranks

MICROBATCHES = 9
SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-v")


def watch(rank: int) -> dict[str, tuple[int, int, list[str]]]:
    """For each family: the most microbatches in flight, the most receives posted and not used, tensors left after."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=4)
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
    # Run three steps of each family. The counts are those of the third one: the first two compare the tied weight.
    seen = {}
    for name in SCHEDULES:
        layers = 4 * FAMILIES[name].default_chunks
        wrapped = wrap(make(Tied if name == "1f1b" else Chain, layers), MICROBATCHES, schedule=name)
        x = rows(MICROBATCHES)
        for _ in range(2):
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
    for name in SCHEDULES:
        family = FAMILIES[name]
        assert [seen[name][0] for seen in ranks] == in_flight_peaks(family.build(4, MICROBATCHES)), name
        # Each stage's receives are posted two compute actions ahead, or as early as those sent after them.
        most = [seen[name][1] for seen in ranks]
        assert max(most) <= (3 if name == "1f1b" else 6 * family.default_chunks), (name, most)
        assert all(seen[name][2] == [] for seen in ranks), name

"""Host-waits sweep: the waits of the host in a steady step of each type, on the fake accelerator.

Two ranks train a type on padded batches from host memory, then on batches that are on the device already. The waits of
the last step of each are counted until ``run_train`` returns. Experts are computed together, without the wait of a
device that has no grouped products. A type is

- no waits: the host runs ahead of the device with batches from host memory;
- waits: it waits, in the lines that are told with their numbers for each rank;
- refused: our error has the reason;
- failing: another error.

Batches on the device cost three waits, for what was computed before the step: for the hash of the step before, for the
numbers of labels and for the inputs that answer questions. More are told.
"""

from functools import partial
from typing import Any

import torch

from nxdpp import NxDPPModel, parallel_state
from tests.support import fake_device
from tests.support.forked_ranks import forked_ranks
from tests.zoo import ARGUMENTS, build, inputs
from tests.zoo.comparison import MICROBATCHES, is_refusal, without_cache, without_randomness
from tests.zoo.inputs import PADDED
from tests.zoo.sweep import Verdict
from tests.zoo.with_loss import with_loss

RANKS = 2
STEPS = 3
ON_DEVICE = 3
TIME_LIMIT = 140.0  # seconds for the ranks


def judge(task: str, model_type: str) -> Verdict:
    """Count the waits of one type over two ranks."""
    try:
        build(task, model_type, "meta")
    except Exception as error:
        return Verdict("does not build", f"{type(error).__name__}: {error}")
    found = forked_ranks(RANKS, partial(_waits, task, model_type), TIME_LIMIT)
    if errors := [each for each in found if isinstance(each, Exception | Verdict)]:
        # The other rank loses its connection.
        first = min(errors, key=lambda each: "onnection" in str(each))
        return first if isinstance(first, Verdict) else Verdict("failing", f"{type(first).__name__}: {first}")
    told = [f"rank {rank}, {text}" for rank, texts in enumerate(found) for text in texts or ()]
    return Verdict("waits" if any("from cpu" in text for text in told) else "no waits", "; ".join(told))


def _waits(task: str, model_type: str, rank: int) -> list[str] | Verdict:
    torch.set_num_threads(1)
    fake_device.install()
    try:
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=RANKS, device="fake", hang_timeout=100)
        bare = build(task, model_type)
        if bare._can_set_experts_implementation():
            bare.set_experts_implementation("batched_mm")
        batch = inputs(task, bare, PADDED)
        model = with_loss(task, bare)
        without_randomness(model)
        without_cache(model)
        arguments: Any = ARGUMENTS.get(model_type, {})
        wrapped = NxDPPModel(model, num_microbatches=MICROBATCHES, broadcast_and_average_loss=True, **arguments)
        wrapped.move_model_to_device()
        told = []
        for place in ("cpu", "fake"):
            given = {name: value.to(place) for name, value in batch.items()}
            for _ in range(STEPS):
                torch.accelerator.synchronize()
                with fake_device.host_waits() as waits:
                    wrapped.run_train(**given)
            if place == "cpu" or sum(waits.values()) > ON_DEVICE:
                told += [f"from {place}: {count} times {line}" for line, count in waits.items()]
        # A process that ends leaves what its device has not run.
        torch.accelerator.synchronize()
        return told
    except Exception as error:
        return Verdict("refused" if is_refusal(error) else "failing", f"{type(error).__name__}: {error}")

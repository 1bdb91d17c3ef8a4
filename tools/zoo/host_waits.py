"""Host-waits sweep: the waits of the host in a steady step of each type, on the fake accelerator.

Two ranks train a type on padded batches from host memory, then on batches that are on the device already. The waits of
the last step of each are counted until ``run_train`` returns. Experts are computed together, without the wait of a
device that has no grouped products. A type is

- no waits: the host runs ahead of the device with batches from host memory;
- waits: it waits, in the lines that are told with their numbers for each rank. "The model's own" are those in which
  the model without nxdpp waits at least as often for the same microbatches, on one device;
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
from tests.support.training_distance import loss_of
from tools.zoo import ARGUMENTS, build, inputs
from tools.zoo.comparison import MICROBATCHES, is_refusal, microbatches_of, without_cache, without_randomness
from tools.zoo.inputs import PADDED
from tools.zoo.sweep import Verdict
from tools.zoo.with_loss import with_loss

RANKS = 2
STEPS = 3
PLACES = ("cpu", "fake")
ON_DEVICE = 3
TIME_LIMIT = 140.0  # seconds for the ranks
_OF_STAGE = "/pipeline/runtime/stage_runner.py:", "/tracing/graph/data_checks.py:"
"""Files that run the traced code between the modules, whose own lines are not known in a step."""


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
    waits = any(of_rank["cpu"] for of_rank in found)
    (alone,) = forked_ranks(1, partial(_waits_alone, task, model_type), TIME_LIMIT) if waits else [{}]
    plain = alone if isinstance(alone, dict) else {}
    told = [
        f"rank {rank}, from {place}: {count} times {line}{_owner(line, count, plain)}"
        for rank, places in enumerate(found)
        for place, of_place in places.items()
        for line, count in of_place.items()
    ]
    return Verdict("waits" if waits else "no waits", "; ".join(told))


def _owner(line: str, count: int, plain: dict[str, int]) -> str:
    """Return a note for ``count`` waits in ``line`` that the model alone has too, by its ``plain`` ones."""
    if plain.get(line, 0) >= count:
        return ", the model's own"
    operation = line.partition(" (")[0]
    alike = {each: number for each, number in plain.items() if each.partition(" (")[0] == operation}
    if any(file in line for file in _OF_STAGE) and sum(alike.values()) >= count:
        return f", the model's own in {', '.join(alike)}"
    return ""


def _made(task: str, model_type: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the model of a type with a loss, and a padded batch."""
    bare = build(task, model_type)
    if bare._can_set_experts_implementation():
        bare.set_experts_implementation("batched_mm")
    batch = inputs(task, bare, PADDED)
    model = with_loss(task, bare)
    without_randomness(model)
    without_cache(model)
    return model, batch


def _waits_alone(task: str, model_type: str, rank: int) -> dict[str, int]:
    """Return the waits of the model alone in the last of several steps of microbatches that are on the device."""
    torch.set_num_threads(1)
    fake_device.install()
    model, batch = _made(task, model_type)
    model.to("fake")
    parts = microbatches_of({name: value.to("fake") for name, value in batch.items()})
    for _ in range(STEPS):
        torch.accelerator.synchronize()
        with fake_device.host_waits() as waits:
            for part in parts:
                loss_of(model(**part)).backward()
    torch.accelerator.synchronize()
    return waits


def _waits(task: str, model_type: str, rank: int) -> dict[str, dict[str, int]] | Verdict:
    """Return the waits of a rank in a step of a batch from host memory and of one on the device."""
    torch.set_num_threads(1)
    fake_device.install()
    try:
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=RANKS, device="fake", hang_timeout=100)
        model, batch = _made(task, model_type)
        arguments: Any = ARGUMENTS.get(model_type, {})
        wrapped = NxDPPModel(model, num_microbatches=MICROBATCHES, broadcast_and_average_loss=True, **arguments)
        wrapped.move_model_to_device()
        found: dict[str, dict[str, int]] = {}
        for place in PLACES:
            given = {name: value.to(place) for name, value in batch.items()}
            for _ in range(STEPS):
                torch.accelerator.synchronize()
                with fake_device.host_waits() as waits:
                    wrapped.run_train(**given)
            found[place] = waits if place == "cpu" or sum(waits.values()) > ON_DEVICE else {}
        # A process that ends leaves what its device has not run.
        torch.accelerator.synchronize()
        return found
    except Exception as error:
        return Verdict("refused" if is_refusal(error) else "failing", f"{type(error).__name__}: {error}")

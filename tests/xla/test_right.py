"""Five models over XLA ranks: loss and gradients of a step, and parameters after 16, as in one process.

The numbers are compared with the CPU's and with those of one XLA process, which both train without nxdpp.
"""

from typing import Any

import pytest
import torch

from nxdpp import NxDPPModel, parallel_state
from tests.support.models import make
from tests.support.training_distance import relative
from tests.support.xla_process import start_xla
from tests.support.xla_ranks import run_xla_ranks
from tests.xla.right_models import (
    MICROBATCHES,
    MODELS,
    STEPS,
    Trained,
    batch,
    build,
    gradients_of,
    optimizer_of,
    train_unwrapped,
    values_of,
)

# Greatest differences of loss and gradients, as shares of their greatest values, and of parameters after all steps.
# Sums of the CPU and of XLA have other orders. One XLA process compiles the same operations as the stages, but XLA
# joins those of a stage in other ways, and a tied weight's gradient is a sum over ranks.
LIMITS = {"cpu": (1e-5, 1e-5), "xla": (1e-6, 1e-5)}


def _train_unwrapped(rank: int) -> dict[str, dict[str, Trained]]:
    devices = {"xla": start_xla(), "cpu": torch.device("cpu")}
    return {which: {name: train_unwrapped(name, device) for name in MODELS} for which, device in devices.items()}


def _train_over_ranks(rank: int, stages: int) -> dict[str, Trained]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=stages, device="xla")
    with pytest.raises(ValueError, match=r"set_experts_implementation\('batched_mm'\)"):
        NxDPPModel(make("mixtral"), num_microbatches=1)
    return {name: _train(name) for name in MODELS}


def _train(name: str) -> Trained:
    replicas, replica = parallel_state.get_data_parallel_size(), parallel_state.get_data_parallel_rank()
    model = NxDPPModel(build(name), num_microbatches=MICROBATCHES // replicas, broadcast_and_average_loss=True)
    model.move_model_to_device()
    optimizer = optimizer_of(model.local_parameters())
    first: tuple[torch.Tensor, dict[str, torch.Tensor]] | None = None
    for step in range(STEPS):
        # The rows of a replica are those of some microbatches of one process.
        loss: Any = model.run_train(**{key: value.chunk(replicas)[replica] for key, value in batch(step).items()})
        first = first or (loss.detach().cpu(), gradients_of(model.local_named_parameters()))
        optimizer.step()
        optimizer.zero_grad()
    assert first is not None
    return Trained(*first, values_of(model.local_named_parameters()))


@pytest.fixture(scope="module")
def one_process() -> dict[str, dict[str, Trained]]:
    """Trainings without nxdpp, by device and model."""
    (trained,) = run_xla_ranks(1, _train_unwrapped, timeout=400)
    return trained  # type: ignore[no-any-return]  # of a generic function


@pytest.mark.parametrize(
    ("ranks", "stages"),
    [
        pytest.param(1, 1, id="one rank"),
        pytest.param(2, 2, id="two ranks"),
        pytest.param(4, 4, id="four ranks"),
        pytest.param(4, 2, id="two ranks of two replicas"),
    ],
)
def test_numbers_are_those_of_one_process(one_process: dict[str, dict[str, Trained]], ranks: int, stages: int) -> None:
    found = run_xla_ranks(ranks, _train_over_ranks, stages, timeout=400)
    for name in MODELS:
        trained = [rank[name] for rank in found]
        model = build(name)
        assert {n for n, _ in model.named_parameters()} <= {n for rank in trained for n in rank.gradients}
        initial = {n: p.detach() for n, p in model.named_parameters(remove_duplicate=False)}
        for device, (of_step, after_steps) in LIMITS.items():
            one = one_process[device][name]
            least = max(gradient.abs().max().item() for gradient in one.gradients.values()) / 1000
            for rank in trained:
                assert relative(rank.loss, one.loss, 0.0) < of_step, (name, device)
                for n, gradient in rank.gradients.items():
                    # The gradient of an attention's key bias is zero but for rounding: ``least`` is its scale.
                    assert relative(gradient, one.gradients[n], least) < of_step, (name, device, n)
                for n, parameter in rank.parameters.items():
                    assert _distance(parameter, one.parameters[n]) < after_steps, (name, device, n)
                    # Each parameter has moved by far more than the limit.
                    assert _distance(parameter, initial[n]) > 20 * after_steps, (name, n)


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one - other).abs().max().item()

"""Steps of a program that has set torch's default device: messages of the host stay in host memory."""

import pytest
import torch

from nxdpp import parallel_state
from tests.pipeline.runtime.scheduled_models import Chain, make, rows, wrap
from tests.support.run_ranks import run_ranks


def _losses(rank: int) -> list[list[float]]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    try:
        # On the meta device a message would have no values.
        return [_train(default) for default in ("cpu", "meta")]
    finally:
        torch.set_default_device("cpu")


def _train(default: str) -> list[float]:
    torch.set_default_device("cpu")
    torch.manual_seed(0)
    model = wrap(make(Chain, 4), 2, broadcast_and_average_loss=True, schedule="zb1p")
    x = rows(4)
    optimizer = torch.optim.SGD(list(model.local_parameters()), lr=0.1)
    torch.set_default_device(default)
    losses = []
    for _ in range(2):
        loss = model.run_train(x=x)
        assert isinstance(loss, torch.Tensor)
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.cpu_only("it sets default devices, the CPU among them")
def test_steps_do_not_depend_on_the_default_device() -> None:
    for with_cpu, with_meta in run_ranks(2, _losses):
        assert with_meta == with_cpu

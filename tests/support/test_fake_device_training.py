"""nxdpp trains on the fake accelerator as in one process, and its host waits for nothing."""

from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from nxdpp.schedules.families.registry import FAMILIES
from tests.support import fake_device
from tests.support.run_ranks import run_ranks

REASON = fake_device.why_not()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.timeout(900),
    pytest.mark.cpu_only("its ranks start the fake accelerator"),
]


@pytest.fixture(scope="module", autouse=True)
def _built_for_training() -> None:
    fake_device.built()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = self.linear(x).tanh()
        return x + changed


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(x, labels)


def _batch(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(8, 8, generator=generator) for name in ("x", "labels")}


def _wrapped(stages: int, **arguments: Any) -> NxDPPModel:
    fake_device.install()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=stages)
    assert parallel_state.local_device() == torch.device("fake", 0)
    torch.manual_seed(0)
    wrapped = NxDPPModel(Blocks(), transformer_layer_cls=Block, num_microbatches=4, **arguments)
    wrapped.move_model_to_device()
    return wrapped


def _train_both(rank: int, stages: int, schedule: str) -> None:
    wrapped = _wrapped(stages, schedule=schedule)
    torch.manual_seed(0)
    whole = Blocks().to("fake")
    replicas = parallel_state.get_data_parallel_size()
    optimizers = [
        torch.optim.SGD(parameters, lr=0.1) for parameters in (wrapped.local_parameters(), whole.parameters())
    ]
    for step in range(3):
        batch = _batch(step)
        replica = parallel_state.get_data_parallel_rank()
        own = {name: tensor.chunk(replicas)[replica] for name, tensor in batch.items()}
        with fake_device.host_waits() as waits:
            wrapped.run_train(**own)
        # The first steps compare what replicas have, and look at marks of missing gradients.
        assert step < 2 or not waits, waits
        assert 0 < wrapped.last_busy_share <= 1
        for rows in zip(*(tensor.to("fake").chunk(4 * replicas) for tensor in batch.values()), strict=True):
            (whole(*rows) / (4 * replicas)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    expected = dict(whole.named_parameters())
    for name, parameter in wrapped.local_named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-6, atol=1e-7)
    parallel_state.destroy_model_parallel()


@pytest.mark.parametrize(
    ("world_size", "stages", "schedule"),
    [
        (2, 2, "1f1b"),
        (2, 2, "gpipe"),
        (2, 2, "zb-v"),
        (2, 1, "1f1b"),
        (4, 4, "zb1p"),
        (4, 2, "zb1p"),
        *(
            pytest.param(2, 2, name, marks=pytest.mark.sweep)
            for name in sorted({*FAMILIES} - {"1f1b", "gpipe", "zb-v"})
        ),
    ],
)
def test_training_equals_one_process_without_a_wait(world_size: int, stages: int, schedule: str) -> None:
    run_ranks(world_size, _train_both, stages, schedule)

"""nxdpp trains on the fake accelerator as in one process, and the errors that it is there for are found."""

from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from tests.support import fake_device
from tests.support.run_ranks import run_ranks
from tests.support.test_fake_device import error_of

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
    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.asks = asks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.asks:
            self.largest = x.abs().max().item()
        changed: torch.Tensor = self.linear(x).tanh()
        return x + changed


class Blocks(nn.Module):
    def __init__(self, asks: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(asks) for _ in range(8))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(x, labels)


def _batch(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(8, 8, generator=generator) for name in ("x", "labels")}


def _wrapped(stages: int, asks: bool = False, **arguments: Any) -> NxDPPModel:
    fake_device.install()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=stages)
    assert parallel_state.local_device() == torch.device("fake", 0)
    torch.manual_seed(0)
    wrapped = NxDPPModel(Blocks(asks), transformer_layer_cls=Block, num_microbatches=4, **arguments)
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
        for rows in zip(*(tensor.to("fake").chunk(4 * replicas) for tensor in batch.values()), strict=True):
            (whole(*rows) / (4 * replicas)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    expected = dict(whole.named_parameters())
    for name, parameter in wrapped.local_named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-6, atol=1e-7)
    parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("schedule", ["1f1b", "zb1p"])
@pytest.mark.parametrize(("world_size", "stages"), [(2, 2), (2, 1), (4, 4), (4, 2)])
def test_training_equals_one_process_without_a_wait(world_size: int, stages: int, schedule: str) -> None:
    run_ranks(world_size, _train_both, stages, schedule)


class _Unwaited:
    def wait(self) -> None:
        pass


def _misses_the_wait_of_a_receive(rank: int) -> str:
    wrapped = _wrapped(2)
    from nxdpp.ranks.transfer_groups import TransferGroups

    between = TransferGroups.between

    class Group:
        def __init__(self, group: Any) -> None:
            self.group = group
            self.send = group.send

        def recv(self, *arguments: Any) -> _Unwaited:
            self.group.recv(*arguments)
            return _Unwaited()

    def unwaited(self: TransferGroups, source: int, destination: int) -> Any:
        group, *numbers = between(self, source, destination)
        return (Group(group), *numbers)

    TransferGroups.between = unwaited  # type: ignore[method-assign]
    return error_of(lambda: wrapped.run_train(**_batch(0)))


def test_missing_wait_of_a_receive() -> None:
    with pytest.raises(AssertionError, match="a race of two streams") as caught:
        run_ranks(2, _misses_and_raises)
    assert "writes it in recv" in str(caught.value)


def _misses_and_raises(rank: int) -> None:
    error = _misses_the_wait_of_a_receive(rank)
    assert error == "no error", error


def _asks_the_device(rank: int) -> list[str]:
    wrapped = _wrapped(2, asks=True)
    with fake_device.host_waits() as waits:
        for step in range(2):
            wrapped.run_train(**_batch(step))
    return [place for place, count in waits.items() if count >= 16]


def test_item_in_a_step() -> None:
    for places in run_ranks(2, _asks_the_device):
        assert len(places) == 1
        assert "_local_scalar_dense" in places[0]
        assert "test_fake_device_training.py" in places[0]

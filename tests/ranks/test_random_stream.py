"""Streams of a rank on a device with a generator of its own: that of the program is where the program left it."""

from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from nxdpp.devices import kinds
from nxdpp.devices.device import Device
from tests.support.run_ranks import run_ranks

OF_DEVICE = torch.Generator()


class DrawingDevice(Device):
    """The CPU, as a device with a generator that ``torch.manual_seed`` does not seed."""

    def random_state(self) -> bytes:
        return OF_DEVICE.get_state().numpy().tobytes()

    def set_random_state(self, state: bytes) -> None:
        OF_DEVICE.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    def seeded_state(self, number: int) -> bytes:
        return torch.Generator().manual_seed(number).get_state().numpy().tobytes()


class Dropped(nn.Module):
    """A layer that draws from the device's generator, and keeps what it draws."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.draws = draws
        self.drawn: list[float] = []

    def forward(self, rows: torch.Tensor) -> Any:
        if not self.draws:
            return self.inner(rows)
        mask = torch.rand(rows.shape, generator=OF_DEVICE)
        self.drawn.append(float(mask.sum()))
        return self.inner(rows) * (mask > 0.5)


def drawn(rank: int, stages: int, draws: bool) -> tuple[list[float], list[float], list[float]]:
    """Numbers of the script after each of four steps: of the CPU, of the device, and those of this rank's layers."""
    kinds.KINDS["cpu"] = kinds.Kind(DrawingDevice, "gloo")
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=stages, hang_timeout=60)
    torch.manual_seed(0)
    OF_DEVICE.manual_seed(0)
    model = NxDPPModel(
        nn.Sequential(*(Dropped(draws) for _ in range(stages))),
        transformer_layer_cls=Dropped,
        loss_fn=lambda output: output.square().mean(),
        num_microbatches=2,
    )
    torch.manual_seed(1)
    of_cpu, of_device = [], []
    for _ in range(4):
        model.run_train(input=torch.ones(4, 8))
        of_cpu.append(float(torch.rand(())))
        of_device.append(float(torch.rand((), generator=OF_DEVICE)))
    return of_cpu, of_device, [each for layer in model.local_modules() for each in getattr(layer, "drawn", [])]


@pytest.mark.cpu_only("it gives the CPU a second generator")
@pytest.mark.parametrize(("ranks", "stages", "draws"), [(4, 2, True), (2, 2, False)])
def test_generators_of_the_device_are_where_the_program_left_them(ranks: int, stages: int, draws: bool) -> None:
    seeded, of_device = torch.Generator().manual_seed(1), torch.Generator().manual_seed(0)
    numbers = [float(torch.rand((), generator=of_device)) for _ in range(4)]
    undisturbed = [float(torch.rand((), generator=seeded)) for _ in range(4)]
    results = run_ranks(ranks, drawn, stages, draws)
    assert all(of_cpu == results[0][0] for of_cpu, _, _ in results)
    assert all(found == numbers for _, found, _ in results)
    assert (results[0][0] == undisturbed) is not draws
    # Each stage, replica, step and microbatch has masks of its own.
    masks = [each for _, _, of_layers in results for each in of_layers]
    assert len({*masks}) == len(masks) == (8 * ranks if draws else 0)

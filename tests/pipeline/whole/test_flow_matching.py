"""Flow matching with label dropout, whose script draws times, noise and labels to drop, trains as in one process."""

from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from tests.support.run_ranks import run_ranks

LAYOUTS = [(2, 2), (4, 4), (4, 2)]
"""Numbers of ranks and of stages."""
STEPS, ROWS, WIDTH, CLASSES = 20, 8, 16, 5


class Block(nn.Module):
    """A layer that sees the time and the label."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        # The last label stands for a dropped one.
        self.labels = nn.Embedding(CLASSES + 1, WIDTH)

    def forward(self, rows: torch.Tensor, time: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return rows + torch.tanh(self.inner(rows) + self.labels(label) * time)


class Velocity(nn.Module):
    """The velocity of a flow from noise to data."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, rows: torch.Tensor, time: torch.Tensor, label: torch.Tensor, target: torch.Tensor) -> Any:
        for layer in self.layers:
            rows = layer(rows, time, label)
        return {"loss": (rows - target).square().mean()}


def batch() -> dict[str, torch.Tensor]:
    """The next batch of a script, all of it drawn from torch's generator."""
    data, label = torch.randn(ROWS, WIDTH, dtype=torch.float64), torch.randint(CLASSES, (ROWS,))
    noise, time = torch.randn(ROWS, WIDTH, dtype=torch.float64), torch.rand(ROWS, 1, dtype=torch.float64)
    label = torch.where(torch.rand(ROWS) < 0.3, CLASSES, label)
    return {"rows": (1 - time) * noise + time * data, "time": time, "label": label, "target": data - noise}


def over_ranks(rank: int, stages: int) -> list[float]:
    """Losses of the training over stages, and over replicas that have a part of each batch."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=stages, hang_timeout=60)
    torch.manual_seed(0)
    model = NxDPPModel(
        Velocity().double(), transformer_layer_cls=Block, num_microbatches=2, broadcast_and_average_loss=True
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_size()
    losses = []
    for _ in range(STEPS):
        own = {name: each.chunk(replicas)[replica] for name, each in batch().items()}
        losses.append(float(model.run_train(**own)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def in_one_process() -> list[float]:
    """Losses of the same script over whole batches."""
    torch.manual_seed(0)
    model = Velocity().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        loss = model(**batch())["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("ranks", "stages"), LAYOUTS)
def test_losses_are_those_of_one_process(ranks: int, stages: int) -> None:
    expected = in_one_process()
    assert len({*expected}) == STEPS
    for losses in run_ranks(ranks, over_ranks, stages):
        assert losses == pytest.approx(expected, rel=1e-9)

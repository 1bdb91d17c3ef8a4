"""16 linear layers, Adam, two pipelines of two ranks: 16 steps beside one process."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nxdpp import parallel_state
from nxdpp.nnscaler import ComputeConfig, ParallelModule, build_optimizer
from tests.doors.nnscaler.own_folders import parallelize
from tests.support.run_ranks import run_ranks

WIDTH, LAYERS, STEPS, MICROBATCHES = 16, 16, 16, 4


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
        self.loss_fn = nn.BCELoss(reduction="sum")

    def forward(self, data: dict[str, torch.Tensor]) -> torch.Tensor:
        x = data["data"]
        for layer in self.layers:
            x = layer(x)
        loss: torch.Tensor = self.loss_fn(torch.sigmoid(x), data["target"])
        return loss


def samples(step: int, unit: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2 * step + unit)
    pairs = torch.rand(MICROBATCHES, 2, 3, WIDTH, generator=generator)
    return [{"data": data, "target": target} for data, target in pairs]


def trained_in_one_process() -> list[dict[str, Any]]:
    """Return the losses, gradients, norm and weights of each step."""
    model = Mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    steps = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [model(each) for unit in range(2) for each in samples(step, unit)]
        for loss in losses:
            loss.backward()
        gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
        gnorm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        weights = {name: each.detach().clone() for name, each in model.named_parameters()}
        steps.append({"losses": losses, "gradients": gradients, "gnorm": gnorm, "weights": weights})
    return steps


def test_gradients_weights_and_norms_are_those_of_one_process() -> None:
    run_ranks(4, _train)


def _train(rank: int) -> None:
    expected = trained_in_one_process()
    for use_zero in (False, True):
        settings = ComputeConfig(
            2, 4, use_end2end=True, use_zero=use_zero, pas_config={"pipeline_nmicros": MICROBATCHES}
        )
        model = parallelize(Mlp(), {"data": samples(0, 0)[0]}, "pp", settings)
        assert isinstance(model, ParallelModule)
        assert len(list(model.parameters())) == LAYERS // 2
        optimizer: Any = build_optimizer(model, torch.optim.Adam, lr=0.01)
        for step, theirs in enumerate(expected):
            losses = model.train_step(samples(step, rank // 2))
            _assert_close(losses, theirs["losses"][rank // 2 * MICROBATCHES :][:MICROBATCHES])
            optimizer.sync_shard_grad()
            for name, parameter in model.named_parameters():
                _assert_close(parameter.grad, theirs["gradients"][name])
            _assert_close(optimizer.clip_gnorm(1.0), theirs["gnorm"])
            optimizer.step()
            optimizer.zero_grad()
            for name, parameter in model.named_parameters():
                _assert_close(parameter.detach(), theirs["weights"][name])
        parallel_state.destroy_model_parallel()
        assert not dist.is_initialized()


def _assert_close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)

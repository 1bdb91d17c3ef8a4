"""Shared experts that run while tokens are on their way: the same numbers, and never those of another input."""

from typing import Any

import torch
from torch import nn

from nxdpp import NxDPPModel, apply_checkpoint, expert_parallelize, parallel_state
from nxdpp.experts import shared
from tests.experts.test_layer import WIDTH, Experts
from tests.support.expert_models import batch_of, make
from tests.support.run_ranks import run_ranks


def _steps(rank: int, recomputes: bool, ahead: bool) -> tuple[int, list[float], dict[str, torch.Tensor]]:
    """Return how often shared experts ran ahead in three steps, the losses, and the last gradients."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    if not ahead:
        shared.settle = lambda: None
    counted, own = [0], shared.SharedExperts.run_ahead

    def run_ahead(self: Any, given: torch.Tensor) -> Any:
        counted[0] += 1
        return own(self, given)

    shared.SharedExperts.run_ahead = run_ahead  # type: ignore[method-assign]  # counts
    wrapped = NxDPPModel(
        expert_parallelize(make("deepseek_v3", 3)), num_microbatches=2, broadcast_and_average_loss=True
    )
    if recomputes:
        apply_checkpoint(wrapped)
    losses = [float(loss) for step in range(3) if (loss := wrapped.run_train(**batch_of(rank, 4, step))) is not None]
    assert len(losses) == 3
    gradients = {name: each.grad for name, each in wrapped.local_named_parameters() if each.grad is not None}
    return counted[0], losses, gradients


def test_they_run_ahead_and_are_equal_to_the_bit() -> None:
    for recomputes in (False, True):
        behind, ahead = (run_ranks(2, _steps, recomputes, each) for each in (False, True))
        for (number, *numbers), (counted, losses, gradients) in zip(behind, ahead, strict=True):
            # 2 steps of 2 microbatches in 2 layers, and again in the backward.
            assert (number, counted) == (0, 16 if recomputes else 8)
            assert numbers[0] == losses
            assert all(torch.equal(each, gradients[name]) for name, each in numbers[1].items())


class _Block(nn.Module):
    """Changes its input after the experts have got it, and gives it to the shared ones."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.shared_experts = Experts(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index = torch.arange(len(x)).unsqueeze(1) % 4
        found: torch.Tensor = self.experts(x, torch.ones(len(x), 1), index)
        x.mul_(2)
        result: torch.Tensor = found + self.shared_experts(x)
        return result


def _changed(rank: int) -> list[float]:
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    torch.manual_seed(0)
    block = _Block()
    expert_parallelize(block, {"experts.matrix": "grouped_gemm", "experts.offset": "grouped_gemm"})
    x = torch.arange(2.0 * WIDTH).view(2, WIDTH)
    found = []
    for _ in range(2):
        found.append(float(block(x.clone()).sum().detach()))
        shared.settle()
    return found


def test_an_input_that_is_changed_meanwhile_is_not_the_same() -> None:
    for first, second in run_ranks(2, _changed):
        assert first == second

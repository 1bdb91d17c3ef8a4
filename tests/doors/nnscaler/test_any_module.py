"""Modules in which little or nothing divides, over two units of two ranks: the numbers of one process."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import parallel_state
from nxdpp.doors.nnscaler.policy_graph import PolicyGraph
from nxdpp.nnscaler import ComputeConfig, ParallelModule, build_optimizer
from tests.doors.nnscaler.own_folders import parallelize
from tests.support.run_ranks import run_ranks

RANKS, STEPS = 4, 2


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # The norm cancels a bias.
        self.convolution, self.norm = nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3)
        self.head = nn.Linear(12, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.convolution(x.unflatten(1, (1, 4, 4)))).relu()
        return self.head(hidden.flatten(1))  # type: ignore[no-any-return]


class WithLoss(Convolutional):
    """End-to-end. A pipeline is cut after the convolution or the norm, which are layers then."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


class HandMade(nn.Module):
    """Uses the weight of a linear layer without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.linear.weight.t() + self.linear.bias


class Mixed(nn.Module):
    """A layer that divides, one that does not, and dimensions before the features."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.last = nn.Linear(16, 8), nn.Linear(8, 3, bias=False), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.down(self.up(x[:, None]).tanh()).tanh())  # type: ignore[no-any-return]


KINDS = (Convolutional, HandMade, Mixed)


def batch(unit: int, step: int) -> torch.Tensor:
    return torch.randn(3, 16, generator=torch.Generator().manual_seed(10 * step + unit))


def loss(module: nn.Module, unit: int, step: int) -> torch.Tensor:
    output: torch.Tensor = module(batch(unit, step))
    return output.square().mean()


def of_all_units(module: Callable[[torch.Tensor], torch.Tensor], step: int) -> torch.Tensor:
    """The sum of the losses of the units; a batch norm counts the samples of both."""
    outputs = module(torch.cat([batch(unit, step) for unit in range(RANKS // 2)]))
    return torch.stack([each.square().mean() for each in outputs.chunk(RANKS // 2)]).sum()


def trained(rank: int, policy: str, kind: type[nn.Module], settings: dict[str, Any]) -> list[str]:
    """Compare two steps with one process; return the warnings of ``parallelize``."""
    torch.manual_seed(1)
    whole = kind()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        config = ComputeConfig(2, RANKS, pas_config={"pipeline_nmicros": 4, "seed": 1}, **settings)
        model = parallelize(copy.deepcopy(whole), {"x": batch(0, 0)}, policy, config)
    assert isinstance(model, ParallelModule)
    ours: Any = build_optimizer(model, torch.optim.Adam, lr=0.01)
    theirs = torch.optim.Adam(whole.parameters(), lr=0.01)
    for step in range(STEPS):
        loss(model, rank // 2, step).backward()
        of_all_units(whole, step).backward()
        torch.testing.assert_close(ours.clip_gnorm(0.1), nn.utils.clip_grad_norm_(whole.parameters(), 0.1))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    expected = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        if parameter.shape == expected[name].shape:
            torch.testing.assert_close(parameter, expected[name], rtol=1e-5, atol=1e-6)
    return [str(each.message) for each in seen if "computes the whole module" in str(each.message)]


def recomputed(graph: PolicyGraph, compute_config: ComputeConfig) -> PolicyGraph:
    graph.divide(compute_config.plan_ngpus)
    graph.recompute(["norm"])
    return graph


def normed_with_other_numbers(rank: int) -> None:
    """A unit with more samples than the other would wait for it. A recomputation counts no sample again."""
    torch.manual_seed(1)
    model = parallelize(WithLoss(), {"x": batch(0, 0)}, recomputed, ComputeConfig(2, RANKS, use_end2end=True))
    assert isinstance(model, ParallelModule)
    for step in (model.train_step, model.infer_step):
        with pytest.raises(RuntimeError, match="given 1 sample and another 2, and a BatchNorm2d counts each sample"):
            step([batch(0, 0)] * (1 + rank // 2))
    model.train_step([batch(0, 0)] * 2)
    assert model.get_buffer("norm.num_batches_tracked") == 2
    model.eval()
    model.train_step([batch(0, 0)] * (1 + rank // 2))


def normed_in_a_pipeline(rank: int) -> None:
    """A batch norm in two pipelines of two ranks counts the same microbatch of both."""
    torch.manual_seed(1)
    whole = WithLoss()
    config = ComputeConfig(2, RANKS, use_end2end=True, pas_config={"pipeline_nmicros": STEPS})
    model = parallelize(copy.deepcopy(whole), {"x": batch(0, 0)}, "pp", config)
    assert isinstance(model, ParallelModule)
    ours: Any = build_optimizer(model, torch.optim.SGD, lr=0.1)
    model.train_step([batch(rank // 2, number) for number in range(STEPS)])
    for number in range(STEPS):
        of_all_units(lambda x: Convolutional.forward(whole, x), number).backward()
    ours.step()
    torch.optim.SGD(whole.parameters(), lr=0.1).step()
    state = whole.state_dict()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        torch.testing.assert_close(tensor, state[name], rtol=1e-5, atol=1e-6, msg=name)


def _cases(rank: int) -> dict[tuple[str, str], list[str]]:
    found = {(policy, kind.__name__): trained(rank, policy, kind, {}) for policy in ("tp", "data") for kind in KINDS}
    trained(rank, "data", Mixed, {"use_zero": True, "zero_ngroups": 2})
    normed_with_other_numbers(rank)
    parallel_state.destroy_model_parallel()
    normed_in_a_pipeline(rank)
    return found


def test_what_does_not_divide_is_replicated() -> None:
    for found in run_ranks(RANKS, _cases):
        warned = {case: told for case, told in found.items() if told}
        assert set(warned) == {("tp", "HandMade")}
        assert "HandMade cannot be divided over 2 ranks" in warned["tp", "HandMade"][0]

"""Tied weights over any stages: every owner gets the sum of all gradients, and a frozen copy blocks no rank."""

import torch
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from tests.support.models import gradient_differences, make, padded_batch, reference, train_in_one_process
from tests.support.run_ranks import run_ranks


class SeveralTies(nn.Module):
    """One weight on stages 0 and 1, another on 0 and 2, a third on all three."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.near, self.far, self.shared = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.near_twin, self.far_twin = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.near_twin.weight = self.near.weight
        self.far_twin.weight = self.far.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.shared(self.far(self.near(x))))
        x = self.blocks[1](self.shared(self.near_twin(x)))
        return self.blocks[2](self.far_twin(self.shared(x))).square().mean()  # type: ignore[no-any-return]


class Layer(nn.Linear):
    """The layer class to cut after; the tied layers are plain ``nn.Linear``."""


def several_ties(rank: int) -> dict[str, float | None]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=3)
    torch.manual_seed(0)
    model = SeveralTies()
    model.blocks = nn.ModuleList(Layer(4, 4) for _ in range(3))
    whole = reference(model)
    wrapped = NxDPPModel(model, transformer_layer_cls=Layer, num_microbatches=2)
    x = torch.randn(4, 4)
    for _ in range(3):
        wrapped.run_train(x=x)
        for part in x.chunk(2):
            (whole(part) / 2).backward()
    return gradient_differences(wrapped, whole)


def test_ties_of_different_stages_do_not_mix() -> None:
    ranks = run_ranks(3, several_ties)
    expected = [{"near", "far", "shared"}, {"near", "shared"}, {"far", "shared"}]
    for differences, tied in zip(ranks, expected, strict=True):
        assert {name.split(".")[0] for name in differences} <= tied
        assert all(distance is not None and distance < 1e-6 for distance in differences.values())


def train_both(rank: int) -> float:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    return max(train_long(set_to_none) for set_to_none in (True, False))


def train_long(set_to_none: bool) -> float:
    model = make("tied_llama", layers=2)
    whole = reference(model)
    wrapped = NxDPPModel(model, num_microbatches=2)
    optimizers = [torch.optim.SGD(parameters, lr=0.1) for parameters in (wrapped.parameters(), whole.parameters())]
    for step in range(3):
        for accumulated in range(2):
            batch = padded_batch(4, seed=2 * step + accumulated)
            wrapped.run_train(**batch)
            train_in_one_process(whole, batch, 2)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    expected = whole.state_dict()
    distances = [(value - expected[name]).abs().max() for name, value in wrapped.local_state_dict().items()]
    return float(max(distances))


def test_copies_train_like_a_single_weight() -> None:
    assert max(run_ranks(2, train_both)) < 1e-6

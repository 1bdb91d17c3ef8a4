"""Experts in one process: the sum over each token's experts, tokens that an expert cannot take, and refusals."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from nxdpp import parallel_state
from nxdpp.tensor.modules.moe import ExpertMLPs, MoE, RouterTopK, load_balancing_loss_func

EXPERTS, TOP_K, HIDDEN, INNER = 4, 2, 6, 10


@pytest.fixture(autouse=True)
def alone() -> object:
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()


def layer(capacity: float | None = None, is_gated: bool = True, normalize: bool = True, act_fn: str = "softmax") -> MoE:
    torch.manual_seed(0)
    router = RouterTopK(EXPERTS, TOP_K, HIDDEN, act_fn=act_fn)
    sizes = (EXPERTS, TOP_K, HIDDEN, INNER)
    mlps = ExpertMLPs(*sizes, "silu", is_gated, capacity, normalize_top_k_affinities=normalize)
    return MoE(router, mlps, return_router_logits=True, return_expert_index=True)


def token_by_token(moe: MoE, tokens: torch.Tensor, capacity: int) -> torch.Tensor:
    """The same by loops over tokens and their experts."""
    first, second = (each.get_parameter("weight") for each in moe.expert_mlps.mlp_op.values())
    taken = [0] * EXPERTS
    rows = []
    for token in tokens:
        logits = moe.router.linear_router(token)
        whole = logits.double()
        affinities = whole.softmax(0) if moe.router.act_fn == "softmax" else whole.sigmoid()
        kept = []
        for expert in logits.topk(TOP_K).indices.tolist():
            taken[expert] += 1
            if taken[expert] <= capacity:
                kept.append(expert)
        scale = sum(affinities[expert] for expert in kept) if moe.expert_mlps.normalize else 1.0
        total = torch.zeros(HIDDEN)
        for expert in kept:
            inner = token @ first[expert]
            if moe.expert_mlps.is_gated:
                gate, up = inner.chunk(2)
                inner = functional.silu(gate) * up
            else:
                inner = functional.silu(inner)
            total = total + inner @ second[expert] * (affinities[expert] / scale).float()
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("capacity", "is_gated", "normalize", "act_fn"),
    [(None, True, True, "softmax"), (0.5, True, True, "softmax"), (1.0, False, False, "sigmoid")],
)
def test_a_token_gets_the_sum_of_its_experts(
    capacity: float | None, is_gated: bool, normalize: bool, act_fn: str
) -> None:
    moe = layer(capacity, is_gated, normalize, act_fn)
    inputs = torch.randn(3, 4, HIDDEN, requires_grad=True)
    output, logits, index = moe(inputs)
    tokens = 12 if capacity is None else int(12 * TOP_K * capacity / EXPERTS)
    expected = token_by_token(moe, inputs.reshape(-1, HIDDEN), tokens).view_as(inputs)
    torch.testing.assert_close(output, expected)
    assert (logits.shape, index.shape) == ((12, EXPERTS), (12, TOP_K))
    parameters = [inputs, *moe.parameters()]
    ours = torch.autograd.grad(output.square().sum(), parameters)
    theirs = torch.autograd.grad(expected.square().sum(), parameters)
    torch.testing.assert_close(ours, theirs)


def test_the_loss_of_two_experts_a_token_is_of_their_shares_and_probabilities() -> None:
    probabilities = torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.125, 0.5, 0.25, 0.125]])
    # Shares of the tokens: 1/2, 1, 1/2 and 0; mean probabilities: 5/16, 3/8, 3/16 and 1/8.
    expected = torch.tensor((5 / 32 + 3 / 8 + 3 / 32) * EXPERTS / 2)
    torch.testing.assert_close(load_balancing_loss_func(probabilities.log(), EXPERTS, 2), expected)


def test_jitter_is_only_of_training() -> None:
    router = RouterTopK(EXPERTS, TOP_K, HIDDEN, jitter_eps=0.5)
    inputs = torch.ones(2, 1, HIDDEN)
    assert not torch.equal(router(inputs)[0], router(inputs)[0])
    router.eval()
    assert torch.equal(router(inputs)[0], router(inputs)[0])


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="top_k=5 must be from 1 to num_experts=4"):
        RouterTopK(EXPERTS, 5, HIDDEN)
    mlps: nn.Module = layer().expert_mlps
    with pytest.raises(ValueError, match="the router has top_k=1, and the experts 2"):
        MoE(RouterTopK(EXPERTS, 1, HIDDEN), mlps)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs a sequence-parallel MoE"):
        MoE(RouterTopK(EXPERTS, TOP_K, HIDDEN, True), mlps)  # type: ignore[arg-type]

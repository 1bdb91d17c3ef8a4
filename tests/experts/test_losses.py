"""Losses of routers over all tokens of a step: over its microbatches and replicas, as in one process."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from nxdpp import NxDPPModel, expert_parallelize, parallel_state
from nxdpp.initialization.parts import own_part
from tests.support.expert_models import VOCABULARY, make
from tests.support.run_ranks import run_ranks

MICROBATCHES = 2
LIMIT = 1e-12
EXPERTS, CHOICES = 4, 2


class Routed(nn.Module):
    """A mixture that returns logits, and scores of its routers ``(B, layers, T, experts)``: values of single rows."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Any:
        output = self.model(input_ids=input_ids, output_router_logits=True)
        scores = torch.stack(output.router_logits).view(-1, *input_ids.shape, EXPERTS)
        return output.logits, scores.transpose(0, 1)


def loss_of(logits: Tensor, scores: Tensor, labels: Tensor) -> Tensor:
    """The loss of tokens, and losses of routers over all of ``scores``."""
    balance = load_balancing_loss_func(tuple(scores.transpose(0, 1).flatten(1, 2)), EXPERTS, CHOICES)
    z_loss = scores.logsumexp(-1).square().mean()
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0.1 * balance + 0.01 * z_loss


def loss_of_step(output: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """``loss_of`` this replica's tokens, with the scores of all replicas."""
    logits, scores = output
    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_size()
    parts = [torch.empty_like(scores) for _ in range(replicas)]
    dist.all_gather(parts, scores.detach().contiguous(), parallel_state.get_data_parallel_group())
    # The average over replicas divides the gradient of a replica's own scores.
    parts[replica] = replicas * scores - (replicas - 1) * scores.detach()
    return loss_of(logits, torch.cat(parts), labels)


def _differences(rank: int, pipeline: int, expert: int) -> Mapping[str, float]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=pipeline, expert_model_parallel_size=expert)
    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_size()
    ids = torch.randint(1, VOCABULARY, (4 * replicas, 6), generator=torch.Generator().manual_seed(0))
    whole = Routed(make("mixtral", 2))
    expected = loss_of(*whole(ids), ids)
    expected.backward()

    wrapped = NxDPPModel(
        expert_parallelize(Routed(make("mixtral", 2))),
        num_microbatches=MICROBATCHES,
        loss_fn=loss_of_step,
        loss_over="batch",
        schedule="gpipe",
        broadcast_and_average_loss=True,
    )
    own = ids.chunk(replicas)[replica]
    found = {"loss": float(wrapped.run_train(input_ids=own, labels=own) - expected)}
    for name, parameter in wrapped.local_named_parameters():
        theirs, ours = whole.get_parameter(name).grad, parameter.grad
        assert theirs is not None, name
        assert ours is not None, name
        found[name] = float((ours - own_part(theirs, parameter)).abs().max())
    return {name: value for name, value in found.items() if not abs(value) <= LIMIT}


@pytest.mark.parametrize("expert", [1, 2])
def test_losses_of_routers_over_all_tokens_of_a_step_are_exact(expert: int) -> None:
    assert run_ranks(4, _differences, 2, expert) == [{}] * 4

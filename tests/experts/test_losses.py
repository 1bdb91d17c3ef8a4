"""Losses of routers over all tokens of a step: over its microbatches and replicas, as in one process."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from nxdpp import NxDPPModel, expert_parallelize, parallel_state, recorded_routing
from tests.experts.test_steps import _apart, _gradients
from tests.support.expert_models import VOCABULARY, batch_of, make, step_of_one_process
from tests.support.run_ranks import run_ranks

MICROBATCHES = 2
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
    logits, scores = whole(ids)
    expected = loss_of(logits, scores, ids)
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
    return _apart(found | _gradients(wrapped, whole))


@pytest.mark.parametrize("expert", [1, 2])
def test_losses_of_routers_over_all_tokens_of_a_step_are_exact(expert: int) -> None:
    assert run_ranks(4, _differences, 2, expert) == [{}] * 4


def _move(block: Any, tokens: Tensor) -> None:
    """Move the bias of the router of ``block`` away from experts that got many ``tokens`` ``(experts,)``."""
    block.gate.e_score_correction_bias += 0.1 * (tokens.double().mean() - tokens).sign()


def _count(chosen: list[Tensor]) -> Tensor:
    return torch.bincount(torch.cat([each.flatten() for each in chosen]), minlength=EXPERTS)


def _without_losses(rank: int) -> Mapping[str, float]:
    """Differences of the gradients of two steps, between which biases move that take the place of losses."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, expert_model_parallel_size=2)
    batches = [batch_of(each, 2 * MICROBATCHES) for each in range(2)]
    own = batches[parallel_state.get_data_parallel_rank()]
    wrapped = NxDPPModel(expert_parallelize(make("deepseek_v3", 4)), num_microbatches=MICROBATCHES)
    with recorded_routing(wrapped) as routing:
        wrapped.run_train(**own)
    for name, chosen in routing[0].items():
        tokens = _count([*chosen.values()])
        dist.all_reduce(tokens, group=parallel_state.get_data_parallel_group())
        _move(wrapped.local_module.get_submodule(name.rpartition(".")[0]), tokens)
    wrapped.run_train(**own)

    whole = make("deepseek_v3", 4)
    blocks = [layer.mlp for layer in whole.model.layers if hasattr(layer.mlp, "experts")]
    seen: dict[nn.Module, list[Tensor]] = {block: [] for block in blocks}
    for block in blocks:
        block.experts.register_forward_pre_hook(lambda _, given, block=block: seen[block].append(given[1]))
    step_of_one_process(whole, batches, MICROBATCHES)
    for block in blocks:
        _move(block, _count(seen[block]))
    step_of_one_process(whole, batches, MICROBATCHES)
    assert {name.rpartition(".")[0] for name in routing[0]} <= {f"model.layers.{number}.mlp" for number in (1, 2, 3)}
    return _apart(_gradients(wrapped, whole))


def test_biases_in_place_of_losses_move_as_in_one_process() -> None:
    assert run_ranks(4, _without_losses) == [{}] * 4

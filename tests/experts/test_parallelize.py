"""Experts over data-parallel ranks: numbers are those of one process, in each layout and schedule."""

import copy
from collections.abc import Sequence
from typing import Any

import torch

from nxdpp import NxDPPModel, apply_checkpoint, expert_parallelize, parallel_state, tensor_parallelize
from nxdpp.initialization.parts import own_part
from tests.support.expert_models import batch_of, make, step_of_one_process
from tests.support.run_ranks import run_ranks

MICROBATCHES = 4
# The largest difference of a number in float64.
LIMIT = 1e-12


def _differences(
    name: str, schedule: str, layers: int = 2, checkpointed: bool = False, experts: str = "eager"
) -> dict[str, float]:
    """Differences above the limit of losses, norm and gradients in the steps of a model."""
    model = make(name, layers, experts)
    whole, chunks = copy.deepcopy(model), 2 if schedule == "interleaved" else 1
    expert_parallelize(model)
    if parallel_state.get_tensor_model_parallel_size() > 1:
        tensor_parallelize(model)
    wrapped = NxDPPModel(model, num_microbatches=MICROBATCHES, schedule=schedule, virtual_pipeline_size=chunks)
    if checkpointed:
        apply_checkpoint(wrapped)
    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_size()
    ours, theirs = (torch.optim.SGD(each.parameters(), 0.1) for each in (wrapped, whole))
    found: dict[str, float] = {}
    # The second step averages during the backwards.
    for seed in range(2 if name == "mixtral" else 1):
        batches = [batch_of(each, 2 * MICROBATCHES, seed) for each in range(replicas)]
        # Evaluations exchange tokens too.
        evaluated, loss = wrapped.run_eval(**batches[replica]), wrapped.run_train(**batches[replica])
        expected = step_of_one_process(whole, batches, MICROBATCHES)
        if loss is not None:
            found[f"loss {seed}"] = float(loss - expected[replica])
            found[f"evaluation {seed}"] = float(evaluated - expected[replica])
        norm = wrapped.clip_grad_norm_(0.5)
        found[f"norm {seed}"] = float(norm - torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5))
        for key, parameter in wrapped.local_named_parameters():
            gradient = whole.get_parameter(key).grad
            assert gradient is not None, key
            assert parameter.grad is not None, key
            found[f"gradient {seed} {key}"] = float((parameter.grad - own_part(gradient, parameter)).abs().max())
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert len(found) > 10
    return {key: value for key, value in found.items() if not abs(value) <= LIMIT}


def _train(
    rank: int, tensor: int, pipeline: int, expert: int, cases: Sequence[tuple[Any, ...]]
) -> dict[Any, dict[str, float]]:
    parallel_state.initialize_model_parallel(tensor, pipeline, expert_model_parallel_size=expert)
    return {case: found for case in cases if (found := _differences(*case))}


def test_types_are_exact_on_one_stage() -> None:
    cases: list[tuple[Any, ...]] = [
        (name, "1f1b") for name in ("mixtral", "balanced mixtral", "qwen3_moe", "olmoe", "deepseek_v3")
    ]
    cases.append(("mixtral", "1f1b", 2, False, "batched_mm"))
    assert run_ranks(2, _train, 1, 1, 2, cases) == [{}, {}]


def test_schedules_are_exact_on_two_stages() -> None:
    cases = [
        ("balanced mixtral", "1f1b", 2, True),
        ("mixtral", "interleaved", 4),
        ("mixtral", "zb-v", 4),
        ("qwen3_moe", "zb1p", 4),
        ("olmoe", "dualpipe-v", 4),
        ("deepseek_v3", "zb-v", 4, True),
    ]
    assert run_ranks(4, _train, 1, 2, 2, cases) == [{}] * 4


def test_copies_of_experts_are_exact() -> None:
    assert run_ranks(4, _train, 1, 1, 2, [("mixtral", "1f1b"), ("deepseek_v3", "1f1b")]) == [{}] * 4


def test_whole_experts_next_to_tensor_parallel_layers_are_exact() -> None:
    assert run_ranks(4, _train, 2, 1, 2, [("mixtral", "1f1b"), ("qwen3_moe", "1f1b")]) == [{}] * 4


def test_tensor_ranks_stages_and_experts_together_are_exact() -> None:
    assert run_ranks(8, _train, 2, 2, 2, [("balanced mixtral", "1f1b"), ("qwen3_moe", "zb-v", 4)]) == [{}] * 8


def test_four_ranks_share_the_experts_exactly() -> None:
    assert run_ranks(4, _train, 1, 1, 4, [("olmoe", "1f1b")]) == [{}] * 4


def test_three_of_six_ranks_share_the_experts_exactly() -> None:
    assert run_ranks(6, _train, 1, 1, 3, [("six experts", "1f1b")]) == [{}] * 6

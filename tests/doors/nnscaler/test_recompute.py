"""Modules that recompute their forward: run twice, with the same gradients."""

from typing import Any

import pytest
import torch

from nxdpp.doors.nnscaler.policy_graph import PolicyGraph
from nxdpp.nnscaler import ComputeConfig, ParallelModule
from tests.doors.nnscaler.modules import Block, Blocks, sample_of
from tests.doors.nnscaler.own_folders import parallelize
from tests.support.run_ranks import run_ranks


def policy(graph: PolicyGraph, compute_config: ComputeConfig) -> PolicyGraph:
    graph.recompute(["blocks.1", "blocks.2"])
    return plain(graph, compute_config)


def plain(graph: PolicyGraph, compute_config: ComputeConfig) -> PolicyGraph:
    graph.schedule("1f1b", compute_config.plan_ngpus, 2)
    return graph


def trained(chosen: Any, ranks: int, **settings: Any) -> tuple[dict[str, torch.Tensor | None], int]:
    """Gradients of two samples, and the number of forwards of blocks."""
    torch.manual_seed(0)
    module, calls = Blocks(), list[Block]()
    forward = Block.forward

    def counted(self: Block, x: torch.Tensor) -> torch.Tensor:
        calls.append(self)
        return forward(self, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Block, "forward", counted)
        config = ComputeConfig(ranks, ranks, use_end2end=True, pas_config=settings)
        model = parallelize(module, sample_of(module), chosen, config)
        assert isinstance(model, ParallelModule)
        calls.clear()
        model.train_step([sample_of(module)["sample"]] * 2)
    return {name: parameter.grad for name, parameter in model.named_parameters()}, len(calls)


def _assert_recomputed(ranks: int) -> int:
    (whole, once), (found, often) = trained(plain, ranks), trained(policy, ranks)
    assert list(whole) == list(found)
    for name, gradient in found.items():
        other = whole[name]
        assert gradient is not None
        assert other is not None
        assert gradient.equal(other), name
    return often - once


def _in_a_pipeline(rank: int) -> int:
    return _assert_recomputed(2)


def test_each_stage_runs_its_own_modules_twice() -> None:
    assert run_ranks(2, _in_a_pipeline) == [2, 2]  # a block, two samples

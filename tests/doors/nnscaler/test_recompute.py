"""Modules that recompute their forward: run twice, with the same gradients."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nxdpp import parallel_state
from nxdpp.doors.nnscaler.policies import layout_of
from nxdpp.doors.nnscaler.policy_graph import PolicyGraph
from nxdpp.nnscaler import ComputeConfig, ParallelModule
from tests.doors.nnscaler.modules import Block, Blocks, sample_of
from tests.doors.nnscaler.own_folders import parallelize
from tests.support.run_ranks import run_ranks


@pytest.fixture
def _one_rank() -> Iterator[None]:
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()


def policy(graph: PolicyGraph, compute_config: ComputeConfig) -> PolicyGraph:
    graph.recompute(["blocks.1", "blocks.2"])
    if compute_config.plan_ngpus > 1:
        graph.schedule("1f1b", compute_config.plan_ngpus, 2)
    return graph


def plain(graph: PolicyGraph, compute_config: ComputeConfig) -> PolicyGraph:
    if compute_config.plan_ngpus > 1:
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


@pytest.mark.usefixtures("_one_rank")
def test_a_rank_alone_runs_the_modules_twice() -> None:
    assert _assert_recomputed(1) == 4  # two blocks, two samples


def _in_a_pipeline(rank: int) -> tuple[int, int]:
    more = _assert_recomputed(2)
    _, plain = trained("autodist", 2, pipeline_nmicros=2, max_partition_degree=1, pipeline_scheduler="1f1b")
    found, often = trained(
        "autodist",
        2,
        pipeline_nmicros=2,
        max_partition_degree=1,
        pipeline_scheduler="1f1b",
        recompute_modules="Block",
    )
    torch.manual_seed(0)
    whole, sample = Blocks(), sample_of(Blocks())
    for _ in range(2):
        whole(**sample)[0].backward()
    for name, gradient in found.items():
        assert gradient is not None
        torch.testing.assert_close(gradient, whole.get_parameter(name).grad)
    return more, often - plain


def test_each_stage_runs_its_own_modules_twice() -> None:
    """By a function, and by ``autodist``, which chooses the cuts."""
    by_function, by_autodist = zip(*run_ranks(2, _in_a_pipeline), strict=True)
    assert by_function == (2, 2)
    assert sum(by_autodist) == 8  # four blocks, two samples


def test_names_of_modules() -> None:
    def layout(*names: str) -> tuple[str, ...]:
        def chosen(graph: PolicyGraph, _: ComputeConfig) -> PolicyGraph:
            graph.recompute(names)
            return graph

        return layout_of(chosen, Blocks(), sample_of(Blocks()), ComputeConfig(1, 1, use_end2end=True)).recompute

    assert layout("Block") == tuple(f"blocks.{index}" for index in range(4))
    assert layout("2.up", "head") == ("blocks.2.up", "head")
    with pytest.raises(ValueError, match="Blocks has no module 'layer', by its name or its class"):
        layout("layer")


def test_a_list_of_layers_is_refused_in_a_pipeline() -> None:
    def chosen(graph: PolicyGraph, _: ComputeConfig) -> PolicyGraph:
        graph.recompute(["blocks"])
        graph.schedule("1f1b", 2, 2)
        return graph

    with pytest.raises(ValueError, match="blocks cannot be recomputed in a pipeline: give the layers inside"):
        layout_of(chosen, Blocks(), sample_of(Blocks()), ComputeConfig(2, 2, use_end2end=True))

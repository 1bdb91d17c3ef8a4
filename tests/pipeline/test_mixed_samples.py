"""Samples of different shapes in one step: exact, over ranks, for all families of schedules."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from nxdpp import parallel_state
from nxdpp.schedules.families.registry import FAMILIES
from tests.pipeline.runtime.scheduled_models import Chain
from tests.pipeline.test_samples import assert_trains_alike, one_rank  # noqa: F401  # a fixture
from tests.support.models import make, padded_batch
from tests.support.nccl_rules import use_nccl_rules, wait_for_each_message
from tests.support.plain_models import WIDTH
from tests.support.run_ranks import run_ranks

LENGTHS = (3, 5, 3, 2, 5, 5, 1)


class Skipping(Chain):
    """Later layers use early values, and the sizes of an early one; the output has one part of the sample's length."""

    def forward(self, x: Tensor) -> Any:
        first = self.blocks[0](self.embedding(x))
        hidden = self.blocks[1](first)
        for block in self.blocks[2:]:
            hidden = block(hidden * first)
        loss = self.head(hidden).square().sum() / first.shape[1]
        return loss, hidden.sum(dim=-1), torch.ones_like(first)


def of_lengths(lengths: Sequence[int]) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(2, length, WIDTH, generator=generator)} for length in lengths]


def make_skipping(layers: int = 4) -> Skipping:
    torch.manual_seed(0)
    return Skipping(layers)


def test_different_lengths_are_exact(one_rank: None) -> None:  # noqa: F811
    for settings in ({}, {"gradient_reduction": "sum", "check_against_module": "first"}):
        assert_trains_alike(make_skipping, of_lengths(LENGTHS), None, virtual_pipeline_size=2, **settings)


def test_a_transformers_model_takes_samples_of_different_lengths(one_rank: None) -> None:  # noqa: F811
    def sample(rows: int, length: int) -> dict[str, Tensor]:
        return {name: value[:, :length] for name, value in padded_batch(rows).items()}

    given = [sample(2, 8), sample(1, 5), sample(2, 8), sample(3, 6)]
    assert_trains_alike(lambda: make("llama", use_cache=False), given, virtual_pipeline_size=2)


def over_ranks(rank: int, ranks: int, families: Sequence[str], has_nccl_rules: bool) -> None:
    if has_nccl_rules:
        use_nccl_rules()
        wait_for_each_message()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ranks)
    for name in families:
        chunks = FAMILIES[name].default_chunks
        assert_trains_alike(
            lambda stages=ranks * chunks: make_skipping(max(3, stages)),  # type: ignore[misc]
            of_lengths(LENGTHS),
            lambda number, loss: loss * (number != 2),
            schedule=name,
            virtual_pipeline_size=chunks,
            deallocate_pipeline_outputs=name == "1f1b",
        )


def test_different_shapes_are_exact_over_ranks() -> None:
    run_ranks(2, over_ranks, 2, ("1f1b", "interleaved", "zb-v"), False)


def test_different_shapes_need_no_tags() -> None:
    run_ranks(2, over_ranks, 2, ("interleaved", "zb-v"), True)


@pytest.mark.sweep
@pytest.mark.parametrize("has_nccl_rules", [False, True])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_every_family_takes_different_shapes(ranks: int, has_nccl_rules: bool) -> None:
    run_ranks(ranks, over_ranks, ranks, tuple(FAMILIES), has_nccl_rules, timeout=300.0)

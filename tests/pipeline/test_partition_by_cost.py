"""Wrapping with partition="balanced": every rank cuts by the same costs, and training stays exact."""

from typing import Any

import pytest
import torch

from nxdpp import NxDPPModel, parallel_state
from nxdpp.pipeline.partition_by_cost import check_partition
from tests.distributed import run_ranks
from tests.pipeline.models import (
    gradient_differences,
    llama,
    microbatches,
    padded_batch,
    reference,
    train_in_one_process,
)


def _heavy_head() -> Any:
    torch.manual_seed(1234)
    return llama(vocab_size=2000)


def train_balanced(rank: int) -> tuple[list[str], dict[str, float | None]]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    model, batch = _heavy_head(), padded_batch(4)
    whole = reference(model)
    example = {name: value.to("meta") for name, value in microbatches(batch, 2)[0].items()}
    wrapped = NxDPPModel(model, num_microbatches=2, partition="balanced", partition_batch=example)
    wrapped.run_train(**batch)
    train_in_one_process(whole, batch, 2)
    return wrapped.pipeline_cuts, gradient_differences(wrapped, whole)


def test_a_heavy_head_leaves_its_stage_one_layer() -> None:
    for cuts, differences in run_ranks(2, train_balanced):
        assert cuts == ["model.layers.2"]
        assert differences == {}


BATCH = {"input_ids": torch.empty(1, 8, dtype=torch.int64, device="meta")}


@pytest.mark.parametrize(
    ("partition", "batch", "cuts", "auto", "message"),
    [
        ("best", None, None, False, "'even', 'balanced'"),
        ("balanced", None, None, False, "needs partition_batch"),
        ("balanced", {}, None, False, "needs partition_batch"),
        ("balanced", {**BATCH, "use_cache": False}, None, False, r"these are none: \['use_cache'\]"),
        ("balanced", BATCH, ["model.layers.0"], False, "pipeline_cuts exclude each other"),
        ("balanced", BATCH, None, True, "auto_partition=True, .* exclude each other"),
        ("even", BATCH, None, False, "looks at no inputs"),
    ],
)
def test_what_does_not_go_together(partition: str, batch: Any, cuts: Any, auto: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_partition(partition, batch, cuts, auto)


def test_what_does() -> None:
    check_partition("even", None, ["model.layers.0"], False)
    check_partition("even", None, None, True)
    check_partition("balanced", BATCH, None, False)

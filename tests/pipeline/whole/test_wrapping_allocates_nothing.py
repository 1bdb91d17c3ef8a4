"""Wrapping of a model on the meta device, far larger than memory, without allocation."""

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from nxdpp import NxDPPModel, parallel_state
from tests.support.llama_405b import llama_3_1_405b
from tests.support.process_memory import peak_bytes, reset_peak, resident_bytes
from tests.support.run_ranks import run_ranks

RANKS = 16
ALLOWED_BYTES = 100 * 2**20
LAYER_PARAMETERS = 3_187_703_808


def growth(_: int, rank: int, arguments: dict[str, Any]) -> tuple[int, int]:
    """Peak growth of this process in bytes during wrapping, and the number of parameters of the rank."""
    reset_peak()
    before = resident_bytes()
    parallel_state.initialize_debug(pipeline_model_parallel_rank=rank, pipeline_model_parallel_size=RANKS)
    layers = RANKS * arguments.get("virtual_pipeline_size", 1)
    with torch.device("meta"):
        model = LlamaForCausalLM(llama_3_1_405b(layers))
    wrapped = NxDPPModel(model, num_microbatches=RANKS, **arguments)
    return peak_bytes() - before, sum(parameter.numel() for parameter in wrapped.local_parameters())


def microbatch() -> dict[str, torch.Tensor]:
    return {name: torch.empty(1, 8192, dtype=torch.int64, device="meta") for name in ("input_ids", "labels")}


@pytest.mark.parametrize(("rank", "partition", "virtual_pipeline_size"), [(0, "even", 1), (15, "balanced", 2)])
def test_a_rank_of_the_405b_model_takes_no_memory(rank: int, partition: str, virtual_pipeline_size: int) -> None:
    batch = microbatch() if partition == "balanced" else None
    arguments = {"virtual_pipeline_size": virtual_pipeline_size, "partition": partition, "partition_batch": batch}
    ((taken, parameters),) = run_ranks(1, growth, rank, arguments)
    assert parameters >= LAYER_PARAMETERS
    assert taken < ALLOWED_BYTES

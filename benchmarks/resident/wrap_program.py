"""One process in the place of one rank of the 405B Llama: built on meta and wrapped, up to materialising.

Arguments: pipeline rank, virtual pipeline size, ``even`` or ``balanced``, and the folder to report to.
"""

from benchmarks.resident.program import above_baseline, owned_bytes, peak_above_baseline, report  # isort: skip

import sys
import time
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from benchmarks.resident.published import LLAMA_3_1_405B_STAGES
from nxdpp import NxDPPModel, parallel_state
from tests.support.llama_405b import llama_3_1_405b

MICROBATCHES = 32
TOKENS = 8192


def main(rank: int, virtual_pipeline_size: int, partition: str, folder: Path) -> None:
    """Wrap and report."""
    parallel_state.initialize_debug(
        pipeline_model_parallel_rank=rank, pipeline_model_parallel_size=LLAMA_3_1_405B_STAGES
    )
    imported = above_baseline()
    started = time.perf_counter()
    with torch.device("meta"):
        model = LlamaForCausalLM(llama_3_1_405b())
    batch = {name: torch.empty(1, TOKENS, dtype=torch.int64, device="meta") for name in ("input_ids", "labels")}
    wrapped = NxDPPModel(
        model,
        num_microbatches=MICROBATCHES,
        virtual_pipeline_size=virtual_pipeline_size,
        partition=partition,
        partition_batch=batch if partition == "balanced" else None,
    )
    seconds = time.perf_counter() - started
    report(
        folder,
        imported=imported,
        owned=owned_bytes(wrapped),
        peak=peak_above_baseline(),
        seconds=seconds,
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))

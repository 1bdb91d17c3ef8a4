"""One measured process. It makes its part of a Llama, or wraps Llama-3.1-405B, and reports its memory and time.

    python -m benchmarks.resident.program rank WAY SIZE WEIGHTS FOLDER
    python -m benchmarks.resident.program wrap RANK CHUNKS PARTITION FOLDER

Memory counts from ``BASELINE``, the resident memory right after ``import torch, transformers``; both come first.
"""

from tests.support.process_memory import peak_bytes, reset_peak, resident_bytes

import torch  # isort: skip
import transformers  # isort: skip

BASELINE = resident_bytes()
reset_peak()

import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402

import torch.distributed as dist  # noqa: E402

from benchmarks.resident.ways import SIZES, WAYS, WRAP_RANKS, owned_bytes  # noqa: E402
from nxdpp import NxDPPModel, parallel_state  # noqa: E402
from tests.support.llama_405b import llama_3_1_405b  # noqa: E402

WRAP_MICROBATCHES = 32
WRAP_TOKENS = 8192


def main(mode: str, *arguments: str) -> None:
    """Measure, and write the figures to ``RANK.json`` in the folder named last."""
    *others, folder = arguments
    measured = measure_rank(*others) if mode == "rank" else measure_wrap(*others)
    (Path(folder) / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(measured))


def measure_rank(name: str, size: str, weights: str) -> dict[str, float]:
    """Construct, wrap and materialise: on all ranks at once, or in turn where memory does not allow that."""
    way = WAYS[name]
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=int(os.environ.get("WORLD_SIZE", "1")))
    imported = resident_bytes() - BASELINE
    for turn in range(dist.get_world_size() if way.in_turn else 1):
        dist.barrier()
        if not way.in_turn or turn == dist.get_rank():
            started = time.perf_counter()
            wrapped = way.make(SIZES[size], weights)
            seconds = time.perf_counter() - started
    dist.barrier()
    wrapped.move_model_to_device()
    assert not any(tensor.is_meta for tensor in (*wrapped.parameters(), *wrapped.buffers()))
    measured = _measured(imported, wrapped, seconds)
    parallel_state.destroy_model_parallel()
    return measured


def measure_wrap(rank: str, chunks: str, partition: str) -> dict[str, float]:
    """Build Llama-3.1-405B on meta and wrap it as one of 16 ranks; nothing is materialised."""
    parallel_state.initialize_debug(pipeline_model_parallel_rank=int(rank), pipeline_model_parallel_size=WRAP_RANKS)
    imported = resident_bytes() - BASELINE
    started = time.perf_counter()
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(llama_3_1_405b())
    batch = {name: torch.empty(1, WRAP_TOKENS, dtype=torch.int64, device="meta") for name in ("input_ids", "labels")}
    wrapped = NxDPPModel(
        model,
        num_microbatches=WRAP_MICROBATCHES,
        virtual_pipeline_size=int(chunks),
        partition=partition,
        partition_batch=batch if partition == "balanced" else None,
    )
    return _measured(imported, wrapped, time.perf_counter() - started)


def _measured(imported: int, wrapped: NxDPPModel, seconds: float) -> dict[str, float]:
    return {
        "imported": imported,
        "owned": owned_bytes(wrapped),
        "peak": peak_bytes() - BASELINE,
        "seconds": seconds,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])

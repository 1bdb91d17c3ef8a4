"""One rank of a pipeline that makes its part of a model in one of the ways, and says what that took.

Arguments: the way, the size of the model, the folder of its weights (``-`` where the way reads none), and the folder
to report to.
"""

from benchmarks.resident.program import above_baseline, owned_bytes, peak_above_baseline, report  # isort: skip

import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

from benchmarks.resident.published import SIZES
from benchmarks.resident.ways import WAYS
from nxdpp import parallel_state


def main(name: str, size: str, weights: str, folder: Path) -> None:
    """Construct, wrap and materialise, at the same time on all ranks or, where that is too much, in turn."""
    way = WAYS[name]
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=int(os.environ.get("WORLD_SIZE", "1")))
    imported = above_baseline()
    for turn in range(dist.get_world_size() if way.in_turn else 1):
        dist.barrier()
        if not way.in_turn or turn == dist.get_rank():
            started = time.perf_counter()
            wrapped = way.make(SIZES[size](), weights)
            seconds = time.perf_counter() - started
    dist.barrier()
    wrapped.move_model_to_device()
    assert not any(tensor.is_meta for tensor in (*wrapped.parameters(), *wrapped.buffers()))
    report(folder, imported=imported, owned=owned_bytes(wrapped), peak=peak_above_baseline(), seconds=seconds)
    parallel_state.destroy_model_parallel()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]))

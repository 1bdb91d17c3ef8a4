"""The way of a steady training step on each of two ranks: files, functions, executed lines, calls, and Python's time.

    torchrun --nproc-per-node 2 benchmarks/way_of_a_step.py [--functions]

A steady step is a ``run_train`` of a known signature. Prints the numbers of a Llama of 4 and one of 24 layers, the
files of rank 0, and the milliseconds of its main thread before and after the engine and in the record of changes, for
80 layers. ``tests/ratchet/test_step.py`` holds the numbers.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))

import torch.distributed as dist

from nxdpp import parallel_state
from tests.support.way_of_a_step import milliseconds_around_the_engine, steady_way

_LAYERS = (4, 24)
_TIMED_LAYERS = 80


def main() -> None:
    """Count steps of two models, and time steps of a third."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    is_first = dist.get_rank() == 0
    for layers in _LAYERS:
        way = steady_way(layers)
        totals: list[dict[str, int]] = [{}, {}]
        dist.all_gather_object(totals, way.totals)
        if is_first:
            for rank, numbers in enumerate(totals):
                shown = ", ".join(f"{number} {what}" for what, number in numbers.items())
                print(f"{layers} layers, rank {rank}: {shown}")
        if is_first and layers == _LAYERS[0]:
            print("  functions  lines  calls  file of rank 0")
            for file, functions, lines, calls in way.by_file():
                print(f"  {functions:9}  {lines:5}  {calls:5}  {file}")
                if "--functions" in sys.argv:
                    own = {name: number for (at, name), number in way.calls.items() if at == file}
                    print(
                        "".join(f"                    {number:5}    {name}\n" for name, number in own.items()), end=""
                    )
    before, after, look = milliseconds_around_the_engine(_TIMED_LAYERS)
    if is_first:
        print(f"{_TIMED_LAYERS} layers, rank 0: {before:.2f} ms before the engine, {after:.2f} ms after it; ", end="")
        print(f"{look:.3f} ms in the record of changes, which the first number includes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

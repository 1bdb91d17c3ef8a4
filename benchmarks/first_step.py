"""Time of a first step, of a step with inputs of a new shape, and of the hashes of inputs that ranks compare.

    python benchmarks/first_step.py [--only steps|hashes|start]

trace_speed.py measures only the traces. The hashes are of one rank. Steps are wall time on 4 ranks over gloo,
Llama of 16 layers and 4 microbatches of one sequence. Each new length is run twice: the second step has no trace, no
graph and no metadata exchange left to do.

A start is measured from ``torchrun`` to the end of the first step of 4 ranks with the sizes of the main job, and as far
as the stages of one rank of 64 with the shapes of Llama-3.1-405B; each phase is the median of 3 starts. The import of
nxdpp is compared with the imports of torch and transformers in alternation, in processor time, the median of 10.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = str(Path(__file__).resolve().parent.parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from benchmarks.report import markdown_table  # noqa: E402
from nxdpp import NxDPPModel, parallel_state  # noqa: E402
from nxdpp.agreement.input_hash import InputHasher  # noqa: E402
from tests.support.run_ranks import run_ranks  # noqa: E402

SMALL = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_hidden_layers=16
)  # fmt: skip
LENGTHS = range(8, 38)
RANKS, MICROBATCHES = 4, 4
STARTS = 3
RANK = str(Path(__file__).with_name("starting_rank.py"))

HASHED = {
    "ids, mask, labels (8, 128)": [(8, 128)] * 3,
    "ids, mask, labels (8, 4096)": [(8, 4096)] * 3,
    "ids, mask, labels (64, 8192)": [(64, 8192)] * 3,
}
PIXELS = (8, 3, 224, 224)
SAMPLED = (64, 3, 224, 224)
REPEATS = 50


def main() -> None:
    """Print a table of steps and one of hashes, in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    tables = {"steps": _print_steps, "hashes": _print_hashes, "start": _print_start}
    parser.add_argument("--only", choices=tables)
    only = parser.parse_args().only
    for name, print_table in tables.items():
        if only in (None, name):
            print_table()


def _print_steps() -> None:
    first, new, known = run_ranks(RANKS, step_seconds, SMALL, LENGTHS, timeout=200)[0]
    rows = {
        "first step": [first],
        "step with a known shape": known,
        "step with a new shape, above the known": [a - b for a, b in zip(new, known, strict=True)],
    }
    cells = [[name, f"{1000 * statistics.median(seconds):.1f}", _quartiles(seconds)] for name, seconds in rows.items()]
    print(markdown_table(("", "median ms", "quartiles"), cells, left=("",)))


def step_seconds(rank: int, config: LlamaConfig, lengths: range) -> tuple[float, list[float], list[float]]:
    """Wall seconds of the first step, of steps with a new length, and of the same length again. Collective."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=RANKS)
    model = NxDPPModel(LlamaForCausalLM(config), num_microbatches=MICROBATCHES)

    def step(length: int) -> float:
        ids = torch.randint(config.vocab_size, (MICROBATCHES, length))
        dist.barrier()
        started = time.perf_counter()
        model.run_train(input_ids=ids, labels=ids)
        dist.barrier()
        return time.perf_counter() - started

    first = step(lengths.start - 1)
    steps = [(step(length), step(length)) for length in lengths]
    return first, [new for new, _ in steps], [known for _, known in steps]


def _print_hashes() -> None:
    batches = {
        name: {str(i): torch.randint(1000, shape) for i, shape in enumerate(shapes)} for name, shapes in HASHED.items()
    }
    batches[f"floats {PIXELS}, where check_inputs asks"] = {"pixels": torch.rand(PIXELS)}
    pixels = torch.rand(SAMPLED)
    sampled = {"contiguous": pixels, "transposed": pixels.transpose(0, 1), "sliced": pixels[..., ::2]}
    timed = [(name, batch, hash_seconds(batch, REPEATS)) for name, batch in batches.items()]
    for form, tensor in sampled.items():
        batch = {"pixels": tensor}
        timed.append((f"a sample of floats {SAMPLED}, {form}", batch, hash_seconds(batch, REPEATS, "first")))
    rows = [
        [name, f"{sum(t.nbytes for t in batch.values()) / 2**20:.2f}", f"{1e6 * seconds:.0f}"]
        for name, batch, seconds in timed
    ]
    print(markdown_table(("inputs", "MiB", "median µs"), rows, left=("inputs",)))


def hash_seconds(batch: dict[str, torch.Tensor], repeats: int, check_inputs: str = "always") -> float:
    """Median wall seconds of the hashes of a later step's inputs on one rank; not collective."""
    hasher = InputHasher(check_inputs)
    hasher.of_step([batch], is_first=True)

    def once() -> float:
        started = time.perf_counter()
        hasher.of_step([batch], is_first=False).words()
        return time.perf_counter() - started

    return statistics.median(once() for _ in range(repeats))


def _print_start() -> None:
    torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={RANKS}"]
    jobs = {"main job, 4 ranks": [*torchrun, RANK, "job"], "405B, 1 rank of 64": [RANK, "405B"]}
    starts = {name: [phases_of_start(arguments) for _ in range(STARTS)] for name, arguments in jobs.items()}
    phases = list(starts["main job, 4 ranks"][0])
    taken = {name: {p: statistics.median(s[p] for s in each) for p in each[0]} for name, each in starts.items()}
    cells = [[phase, *(f"{each[phase]:.2f}" if phase in each else "" for each in taken.values())] for phase in phases]
    cells.append(["all", *(f"{sum(each.values()):.2f}" for each in taken.values())])
    print(markdown_table(("seconds", *taken), cells, left=("seconds",)))
    without, with_nxdpp = import_seconds()
    print(
        f"\nImports: {without:.2f} s of processor time without nxdpp, {with_nxdpp / without:.2f} times as long with it."
    )


def phases_of_start(arguments: list[str]) -> dict[str, float]:
    """Wall seconds of each phase of the start of ``python ARGUMENTS``, a job of ``starting_rank.py``."""
    command = [sys.executable, *arguments, f"{time.time()}"]
    ended = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=True)
    phases: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return phases


def import_seconds(times: int = 10) -> tuple[float, float]:
    """Processor seconds of the imports of torch and transformers, and of these with nxdpp; medians of ``times``."""
    others = "import torch.distributed; from transformers import LlamaForCausalLM"
    programs = (others, f"{others}; from nxdpp import NxDPPModel, parallel_state")
    taken: list[list[float]] = [[], []]
    for number in range(times):
        for program, seconds in list(zip(programs, taken, strict=True))[:: 1 if number % 2 else -1]:
            code = f"import time; {program}; print(time.process_time())"
            ended = subprocess.run(
                [sys.executable, "-c", code], env=_environment(), capture_output=True, text=True, check=True
            )
            seconds.append(float(ended.stdout))
    return statistics.median(taken[0]), statistics.median(taken[1])


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}


def _quartiles(seconds: list[float]) -> str:
    if len(seconds) == 1:
        return ""
    low, _, high = statistics.quantiles(seconds, n=4)
    return f"{1000 * low:.1f} to {1000 * high:.1f}"


if __name__ == "__main__":
    main()

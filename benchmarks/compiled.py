"""Step times of eager and of compiled layers: this runtime next to torch.distributed.pipelining, in alternation.

    python benchmarks/compiled.py [--hidden 256] [--family 1f1b] [--backend inductor] [--steps 12]

Two ranks (gloo, one thread each) train the Llama of ``compare.py``, or one of another width. Torch's blocks, embedding,
norm and head are compiled in place, as ``apply_compile`` does. Torch's schedules with split backwards cannot run
compiled blocks (pytorch #161904), and are timed with eager ones. The loss and each gradient are compared with one
process first.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

ROOT = str(Path(__file__).resolve().parent.parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

from benchmarks.comparison import llama  # noqa: E402
from benchmarks.comparison.contenders import NXDPP, TORCH, Contender, Nxdpp, Torch, check_step  # noqa: E402
from benchmarks.comparison.job import Job  # noqa: E402
from benchmarks.comparison.rows import Entrant, case_rows, rows_as_markdown  # noqa: E402
from benchmarks.comparison.timing import Effort, Times, time_contenders  # noqa: E402
from benchmarks.report import describe_session  # noqa: E402
from nxdpp import apply_compile, parallel_state  # noqa: E402
from nxdpp.schedules.families.registry import FAMILIES  # noqa: E402
from tests.support.run_ranks import run_ranks  # noqa: E402

RANKS = 2
SPLIT = ("zb1p", "zb-v")
"""Families of torch that split backwards."""


class CompiledNxdpp(Nxdpp):
    """An ``NxDPPModel`` after ``apply_compile``."""

    def __init__(self, job: Job, family: str, chunks: int, backend: str) -> None:
        super().__init__(job, family, chunks)
        self.entrant = (f"{NXDPP}, {backend}", family)
        apply_compile(self._model, backend=backend)


class CompiledTorch(Torch):
    """Hand-cut stages whose parts are compiled."""

    def __init__(self, job: Job, family: str, chunks: int, backend: str) -> None:
        super().__init__(job, family, chunks)
        self.entrant = (f"{TORCH}, {backend}", family)
        for stage in self._modules:
            for part in _parts(stage):
                part.compile(backend=backend)


def main(arguments: list[str] | None = None) -> None:
    """Print a table in Markdown; a failed rank raises with the output of every rank."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hidden", type=int, default=llama.HIDDEN, help="width of the Llama")
    parser.add_argument("--family", choices=["gpipe", "1f1b", "interleaved", *SPLIT], default="1f1b")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--steps", type=int, default=12, help="steps of each contender, after 2")
    asked = parser.parse_args(arguments)
    effort = Effort(warm_up=2, steps=asked.steps)
    session = {**describe_session(), **effort._asdict()}
    times, seconds = run_ranks(RANKS, _run_rank, asked.hidden, asked.family, asked.backend, effort, timeout=900.0)[0]
    case = f"p={RANKS}, width {asked.hidden}, {llama.MICROBATCHES} x {llama.MICROBATCH} x {llama.SEQUENCE} tokens"
    walls = {entrant: [1000 * wall for wall in taken.wall] for entrant, taken in times.items()}
    eager: dict[Entrant, float | None] = {(name, asked.family): None for name in (TORCH, NXDPP)}
    rows = case_rows("compiled", case, "ms a step, less is better", walls, lambda *_: eager)
    print(rows_as_markdown(rows, session))
    print(f"\nThe first step of {NXDPP} with {asked.backend}: {seconds:.1f} s.")


def _run_rank(rank: int, hidden: int, family: str, backend: str, effort: Effort) -> tuple[dict[Entrant, Times], float]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=RANKS)
    job = llama.llama_job(llama.LlamaSize(hidden))
    loss, gradients = job.reference()
    chunks = FAMILIES[family].default_chunks
    contenders: list[Contender] = [CompiledNxdpp(job, family, chunks, backend)]
    if family not in SPLIT:
        contenders.append(CompiledTorch(job, family, chunks, backend))
    contenders += [Nxdpp(job, family, chunks), Torch(job, family, chunks)]
    start = time.perf_counter()
    check_step(contenders[0], loss, gradients)
    seconds = time.perf_counter() - start
    for contender in contenders[1:]:
        check_step(contender, loss, gradients)
    return time_contenders(contenders, effort), seconds


def _parts(stage: nn.Module) -> Iterator[nn.Module]:
    assert isinstance(stage, llama.LlamaStage), "llama_job cuts"
    body: Any = stage.model
    yield from (part for part in (body.embed_tokens, *body.layers.values(), body.norm, stage.lm_head) if part)


if __name__ == "__main__":
    main()

"""Cases of the acceptance, and the program of one rank that runs them all.

Each rank also trains the whole model by itself on its device, for the numbers and the time of one process.
"""

import copy
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from nxdpp import NxDPPModel, parallel_state
from nxdpp.devices.kinds import device_of
from nxdpp.schedules.families.registry import FAMILIES

ROWS_A_MICROBATCH = 2
# Sums over replicas have a different order than in one process; see the promises in docs/design.md.
_ROUNDED = 1e-4


class Size(NamedTuple):
    """Sizes of the model and of a step."""

    hidden: int
    vocabulary: int
    sequence: int
    steps: int


SIZES = {"cpu": Size(32, 64, 32, 3), "cuda": Size(1024, 8192, 512, 10)}


class Job(NamedTuple):
    """The job of all ranks.

    Attributes:
        ranks: number of ranks.
        backend: ``"gloo"`` or ``"nccl"``.
        device: device of a rank over gloo; over NCCL each rank takes its own.
    """

    ranks: int
    backend: str
    device: str


class Case(NamedTuple):
    """A schedule on a number of replicas."""

    schedule: str
    replicas: int = 1
    trains: bool = True


@dataclass
class Result:
    """Figures of one rank for one case.

    Attributes:
        schedule, replicas, trains: the case.
        loss: difference from the loss of one process, relative; ``None`` on ranks without the last stage.
        gradients: largest difference from a gradient of one process, relative to its largest element.
        seconds, alone: median time of a step, here and in one process on this device.
        busy: share of the last step in which the rank computed.
        allowed: largest difference that passes.
    """

    schedule: str
    replicas: int
    trains: bool
    loss: float | None
    gradients: float
    seconds: float
    alone: float
    busy: float
    allowed: float

    @property
    def passes(self) -> bool:
        """``True`` if the numbers are as in one process."""
        return max(self.loss or 0.0, self.gradients) <= self.allowed


def cases(ranks: int) -> list[Case]:
    """Return all families, an evaluation, and two replicas where the ranks are enough."""
    replicated = [Case("1f1b", replicas=2)] if ranks >= 4 and ranks % 2 == 0 else []
    return [*map(Case, FAMILIES), Case("1f1b", trains=False), *replicated]


def run_rank(job: Job, rank: int) -> list[Result]:
    """Run all cases on this rank."""
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    size = SIZES["cpu" if job.device == "cpu" else "cuda"]
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=2 * size.hidden,
        # A layer for each stage of two chunks a rank.
        num_hidden_layers=2 * job.ranks,
        num_attention_heads=4,
        tie_word_embeddings=False,
        use_cache=False,
    )
    whole = LlamaForCausalLM(config)
    found = []
    for case in cases(job.ranks):
        parallel_state.initialize_model_parallel(1, job.ranks // case.replicas, backend=job.backend)
        try:
            found.append(_Run(job, case, size, whole).result())
        finally:
            parallel_state.destroy_model_parallel()
        if rank == 0:
            print(f"{case.schedule}: {found[-1].seconds:.3f} s a step", file=sys.stderr, flush=True)
    return found


class _Run:
    """One case on this rank."""

    def __init__(self, job: Job, case: Case, size: Size, whole: nn.Module) -> None:
        self._case = case
        self._size = size
        own = parallel_state.local_device() if job.backend == "nccl" else torch.device(job.device)
        self._device = device_of(own)
        self._alone = copy.deepcopy(whole).to(own)
        self._microbatches = 2 * job.ranks
        self._wrapped = NxDPPModel(
            copy.deepcopy(whole), num_microbatches=self._microbatches, schedule=case.schedule, return_mb_loss=True
        )
        self._wrapped.move_model_to_device(own)

    def result(self) -> Result:
        """Train one step on both, compare, and time further steps."""
        batches = self._batches()
        own = batches[parallel_state.get_data_parallel_rank()]
        listed = self._step(own)
        losses = [loss for batch in batches for loss in self._step_alone(batch, len(batches))]
        replica = parallel_state.get_data_parallel_rank()
        ours = losses[replica * self._microbatches : (replica + 1) * self._microbatches]
        loss = None if listed is None else max(_difference(a, b) for a, b in zip(listed, ours, strict=True))
        gradients = max(self._gradient_differences(), default=0.0)
        return Result(
            *self._case,
            loss,
            gradients,
            self._seconds(lambda: self._step(own)),
            self._seconds(lambda: self._step_alone(batches[0], 1)),
            self._wrapped.last_busy_share,
            0.0 if len(batches) == 1 else _ROUNDED,
        )

    def _batches(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        shape = (self._case.replicas, self._microbatches * ROWS_A_MICROBATCH, self._size.sequence)
        return list(torch.randint(self._size.vocabulary, shape, generator=generator))

    def _step(self, ids: torch.Tensor) -> list[torch.Tensor] | None:
        run = self._wrapped.run_train if self._case.trains else self._wrapped.run_eval
        return cast("list[torch.Tensor] | None", run(input_ids=ids, labels=ids))

    def _step_alone(self, ids: torch.Tensor, replicas: int) -> list[torch.Tensor]:
        losses = []
        for part in ids.to(self._device.device).chunk(self._microbatches):
            with torch.set_grad_enabled(self._case.trains):
                loss = self._alone(input_ids=part, labels=part).loss
            if self._case.trains:
                (loss / self._microbatches / replicas).backward()
            losses.append(loss.detach())
        return losses

    def _gradient_differences(self) -> Iterator[float]:
        theirs = dict(self._alone.named_parameters())
        for name, parameter in self._wrapped.local_named_parameters():
            gradients = parameter.grad, theirs[name].grad
            if self._case.trains:
                yield _difference(*gradients)

    def _seconds(self, step: object) -> float:
        assert callable(step)
        times = []
        for _ in range(self._size.steps):
            self._device.synchronize()
            started = time.perf_counter()
            step()
            self._device.synchronize()
            times.append(time.perf_counter() - started)
        return sorted(times)[len(times) // 2]


def _difference(ours: torch.Tensor | None, theirs: torch.Tensor | None) -> float:
    """Return the largest difference, relative to the largest element; 0 for equal bits."""
    if ours is None or theirs is None or torch.equal(ours, theirs):
        return float("inf") if (ours is None) != (theirs is None) else 0.0
    apart = float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp_min(1e-30))
    return apart if apart == apart else float("inf")


def main() -> None:
    """Run a rank: the job and a folder for the results are the arguments."""
    job, folder = Job(*json.loads(sys.argv[1])), Path(sys.argv[2])
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    found = [asdict(result) for result in run_rank(job, rank)]
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

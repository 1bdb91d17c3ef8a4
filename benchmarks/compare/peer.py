"""torch.distributed.pipelining with stages made by hand and its own schedules."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from benchmarks.compare.contender import PEER, Contender
from benchmarks.compare.job import Job
from nxdpp.schedules.families.registry import find_family

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb1p": ScheduleInterleavedZeroBubble,
    "zb-v": ScheduleZBVZeroBubble,
}
"""The families that both runtimes have."""


class Peer(Contender):
    """The stages of a rank, placed as the family places them, and torch's schedule for it."""

    def __init__(self, job: Job, family: str, chunks: int) -> None:
        super().__init__(PEER, family)
        rank, ranks = dist.get_rank(), dist.get_world_size()
        own = find_family(family).placement(ranks, chunks).stages_of(rank)
        count = ranks * chunks
        model = job.make_model()
        self._modules = [job.cut(model, stage, count) for stage in own]
        stages = [
            PipelineStage(module, stage, count, torch.device("cpu"))
            for stage, module in zip(own, self._modules, strict=True)
        ]
        takes_many = family in ("interleaved", "zb1p", "zb-v")
        self._schedule = SCHEDULES[family](stages if takes_many else stages[0], job.microbatches, loss_fn=job.loss)
        self._input = (job.first_input,) if 0 in own else ()
        self._target = job.target if count - 1 in own else None

    def step(self) -> torch.Tensor | None:
        """One step of the schedule; nobody asks for outputs."""
        losses: list[torch.Tensor] = []
        self._schedule.step(*self._input, target=self._target, losses=losses, return_outputs=False)
        return torch.stack(losses).mean() if losses else None

    def parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Those of this rank's stages."""
        return [named for module in self._modules for named in module.named_parameters()]

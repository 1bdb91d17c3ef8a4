"""Contenders: this runtime, torch's, and a loop written by hand, each running a step of the same job."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from benchmarks.comparison.handwritten import HandwrittenStage
from benchmarks.comparison.job import Job
from benchmarks.comparison.rows import Entrant
from nxdpp import NxDPPModel, fully_shard
from nxdpp.schedules.families.registry import find_family

NXDPP, TORCH, BY_HAND = "nxdpp", "torch", "by hand"

TORCH_SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb1p": ScheduleInterleavedZeroBubble,
    "zb-v": ScheduleZBVZeroBubble,
    "dualpipe-v": ScheduleDualPipeV,
}
"""The families that both runtimes have."""


class Contender(ABC):
    """One rank's part of a pipeline; ``entrant`` is its name and its schedule family."""

    def __init__(self, name: str, family: str) -> None:
        self.entrant: Entrant = (name, family)

    @abstractmethod
    def step(self) -> torch.Tensor | None:
        """Run forward and backward of all microbatches; return the mean loss on the last stage's rank. Collective."""

    @abstractmethod
    def parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """This rank's parameters under their names in the whole model."""

    def clear_gradients(self) -> None:
        """Set all gradients to ``None``."""
        for _, parameter in self.parameters():
            parameter.grad = None


class Nxdpp(Contender):
    """An ``NxDPPModel``, through its public API; with ``shards`` its parameters are divided over the replicas."""

    def __init__(self, job: Job, family: str, chunks: int, shards: bool = False) -> None:
        super().__init__(NXDPP, family)
        self._model = NxDPPModel(
            job.make_model(),
            transformer_layer_cls=job.layer_class,
            num_microbatches=job.microbatches,
            schedule=family,
            virtual_pipeline_size=chunks,
        )
        self._model.move_model_to_device(job.first_input.device)
        if shards:
            fully_shard(self._model)
        self._inputs = job.inputs

    def step(self) -> torch.Tensor | None:
        """Call ``run_train``."""
        loss = self._model.run_train(**self._inputs)
        assert not isinstance(loss, list), "the job has one loss"
        return loss

    def parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Parameters of this rank's stages."""
        return self._model.local_named_parameters()


class Torch(Contender):
    """Hand-cut stages, with the same placement, in a schedule of torch.distributed.pipelining."""

    def __init__(self, job: Job, family: str, chunks: int) -> None:
        super().__init__(TORCH, family)
        rank, ranks = dist.get_rank(), dist.get_world_size()
        own = find_family(family).placement(ranks, chunks).stages_of(rank)
        count = ranks * chunks
        model, device = job.make_model(), job.first_input.device
        self._modules = [job.cut(model, stage, count).to(device) for stage in own]
        stages = [PipelineStage(module, stage, count, device) for stage, module in zip(own, self._modules, strict=True)]
        given = stages if chunks > 1 else stages[0]
        self._schedule = TORCH_SCHEDULES[family](given, job.microbatches, loss_fn=job.loss)
        self._input = (job.first_input,) if 0 in own else ()
        self._target = job.target if count - 1 in own else None

    def step(self) -> torch.Tensor | None:
        """Run one step of the schedule, without returning outputs."""
        losses: list[torch.Tensor] = []
        self._schedule.step(*self._input, target=self._target, losses=losses, return_outputs=False)
        return torch.stack(losses).mean() if losses else None

    def parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Parameters of this rank's stages."""
        return [named for module in self._modules for named in module.named_parameters()]


class ByHand(Contender):
    """A 1F1B loop written for one stage a rank."""

    def __init__(self, job: Job) -> None:
        super().__init__(BY_HAND, "1f1b")
        self._stage = HandwrittenStage(job)

    def step(self) -> torch.Tensor | None:
        """Run the loop."""
        return self._stage.step()

    def parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Parameters of this rank's stage."""
        return self._stage.module.named_parameters()


def make_contenders(job: Job, family: str, chunks: int) -> Iterator[Contender]:
    """All contenders that run ``family``."""
    if family == "1f1b":
        yield ByHand(job)
    if family in TORCH_SCHEDULES:
        yield Torch(job, family, chunks)
    yield Nxdpp(job, family, chunks)


def check_step(contender: Contender, loss: torch.Tensor, gradients: Mapping[str, torch.Tensor]) -> None:
    """Run a step, and raise ``AssertionError`` unless its loss and gradients are as in one process.

    Equal to 1e-5 of the largest element: weight-gradients may be summed in a different order.
    """
    contender.clear_gradients()
    own = contender.step()
    name = " ".join(contender.entrant)
    if own is not None:
        _check_close(f"{name}: loss", own, loss)
    for parameter_name, parameter in contender.parameters():
        assert parameter.grad is not None, f"{name}: no gradient of {parameter_name}"
        _check_close(f"{name}: gradient of {parameter_name}", parameter.grad, gradients[parameter_name])


def _check_close(label: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    scale = expected.abs().max().item()
    assert scale > 0, f"{label}: the expected tensor is zero, so nothing is compared"
    difference = (found.detach() - expected).abs().max().item()
    assert difference <= 1e-5 * scale, f"{label} differs by {difference}, and its largest element is {scale}"

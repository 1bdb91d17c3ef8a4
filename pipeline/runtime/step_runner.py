"""Running steps on one rank of a pipeline: the same on all ranks, with the engine for the inputs at hand."""

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from nxdpp.parallel_layers import failure_watch, parallel_state
from nxdpp.pipeline.agreement.same_step import SameStep, Step
from nxdpp.pipeline.p2p.transport import Direction, Transport
from nxdpp.pipeline.runtime.engine import Engine
from nxdpp.pipeline.stages.program import RankProgram
from nxdpp.pipeline.timeline.step_timeline import StepTimeline
from nxdpp.schedules.actions import Schedule
from nxdpp.schedules.chosen import ChosenSchedule
from nxdpp.schedules.lowering.lowering import lower, lower_rank
from nxdpp.schedules.lowering.releases import releases
from nxdpp.schedules.lowering.rendezvous import sends_in_flight

# Enough for a transfer to run while the next value is computed.
_SENDS_UNDER_WAY = 2


class Steps:
    """The steps of this rank.

    Args:
        schedule: of the pipeline.
        rank: this rank of it.
        keep_outputs: hold sent activations until their backward.
        trace_path: where to write what happens in each step; ``None`` not to.

    Attributes:
        origin: what random numbers this rank's values are from, see ``LocalPart``; to be set before the first step.
    """

    def __init__(self, schedule: ChosenSchedule, rank: int, keep_outputs: bool, trace_path: Path | None = None) -> None:
        self.busy_share = 0.0
        self.origin: str | None = None
        self._schedule = schedule
        self._rank = rank
        self._keep_outputs = keep_outputs
        self._transport: Transport | None = None
        self._trace = None if trace_path is None else StepTimeline(trace_path, schedule.name)
        self._same_step: SameStep | None = None

    def transport(self, device: torch.device) -> Transport:
        """The way to the other ranks for tensors on ``device``."""
        if self._transport is None:
            ways = [(direction, upwards) for direction in Direction for upwards in (False, True)]
            groups = dict(zip(ways, parallel_state.get_pipeline_transfer_groups(), strict=True))
            self._transport = Transport(groups, parallel_state.get_pipeline_control_group(), device)
        return self._transport

    def forget_device(self) -> None:
        """The stages have moved."""
        self._transport = None

    def run(
        self, program: RankProgram, microbatches: list[dict[str, Any]], device: torch.device, train: bool
    ) -> list[list[Any]]:
        """One step; collective over the pipeline.

        Returns the results of each microbatch on the rank of the last stage, nothing on others. Raises
        ``RuntimeError`` where the ranks are not about to do the same thing, and what fails in the step.
        """
        if self._same_step is None:
            self._same_step = SameStep(parallel_state.get_pipeline_control_group(), self.origin)
        signature = (_signature(microbatches[0]), _autocast(device.type), train)
        known = program.engines.get(signature)
        step = Step(program.graph, signature)
        step_digest = step.digest if known is None else known[1]
        try:
            self._same_step.check(step, step_digest, known is None)
        except Exception as error:
            failure_watch.report(error)
            raise
        engine = self._engine(program, device, train) if known is None else known[0]
        with nullcontext() if self._trace is None else self._trace.step(device, train):
            results = engine.run(microbatches)
        self.busy_share = engine.busy_share
        if known is None:
            program.remember(signature, engine, step_digest)
        return results

    def _engine(self, program: RankProgram, device: torch.device, train: bool) -> Engine:
        compute = self._schedule.training if train else self._schedule.evaluation
        actions = lower_rank(compute, self._rank, program.edges)
        return Engine(
            program.stages,
            self._schedule.placement,
            self._rank,
            self.transport(device),
            self._schedule.microbatches,
            device,
            train,
            self._keep_outputs,
            actions,
            releases(compute, self._rank, program.edges) if train else [],
            self._under_way(compute, program, train),
            None if self._trace is None else self._trace.recorder,
        )

    def _under_way(self, compute: Schedule, program: RankProgram, train: bool) -> int | None:
        """How many sends may be under way: any number, where what is sent is kept for the backward anyway."""
        if train and self._keep_outputs:
            return None
        return max(_SENDS_UNDER_WAY, sends_in_flight(lower(compute, program.edges), program.edges))


def _signature(inputs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Shapes and dtypes; what is no tensor is part of the graph, or is checked where it changes a shape."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    return tuple((name, tuple(value.shape), value.dtype) for name, value in sorted(tensors.items()))


def _autocast(device_type: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)

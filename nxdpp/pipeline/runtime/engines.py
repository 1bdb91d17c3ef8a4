"""Engines of one rank: one for each program and signature of a step. They share the transfers to other ranks."""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from nxdpp.agreement.step_signature import LastUsed, StepSignature
from nxdpp.devices.kinds import device_of, has_streams
from nxdpp.pipeline.config import PipelineConfig
from nxdpp.pipeline.p2p.transport import Transport
from nxdpp.pipeline.runtime.engine import Engine
from nxdpp.pipeline.runtime.stage_channels import EngineConfig
from nxdpp.pipeline.stages.cut_graph import RankStages
from nxdpp.pipeline.step import Participant
from nxdpp.pipeline.timeline.step_timeline import StepTimeline
from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults import failure_watch
from nxdpp.schedules.actions import Action, ActionKind
from nxdpp.schedules.chosen import ChosenSchedule
from nxdpp.schedules.lowering.additions import Addition, Around
from nxdpp.schedules.lowering.releases import in_flight_limit, rank_program
from nxdpp.schedules.timeline_file import check_path


class Engines:
    """The engines of this rank.

    Args:
        config: settings of the pipeline.
        schedule: its schedule.
        rank: this rank of the pipeline.

    Attributes:
        known: by program, type of device and signature, each engine with the digest of its steps.
        timeline: writes each step to the timeline's file; ``None`` without one.
    """

    def __init__(self, config: PipelineConfig, schedule: ChosenSchedule, rank: int) -> None:
        self._schedule, self._rank = schedule, rank
        self._keep_outputs = not config.deallocate_pipeline_outputs
        self._loss_gradient = config.loss_gradient
        path = config.trace_file_path
        self.timeline = None if path is None else StepTimeline(check_path(path), schedule.name)
        self._transport: Transport | None = None
        self.known: WeakKeyDictionary[RankStages, LastUsed[Any, tuple[Engine, int]]] = WeakKeyDictionary()
        # By the pairs of stages that exchange tensors, whether backwards follow, the microbatches, and the additions.
        self._lowered: dict[Any, tuple[list[Action], int | None]] = {}

    def transport(self, device: torch.device) -> Transport:
        """The transfers to other ranks of tensors on ``device``.

        Raises ``RuntimeError`` for tensors in host memory where the ranks exchange those of devices, and for another
        device than in the steps before.
        """
        if self._transport is None:
            groups = parallel_state.get_pipeline_transfer_groups()
            if groups.backend != "gloo" and not has_streams(device.type):
                own = parallel_state.local_device()
                raise RuntimeError(
                    f"the model is on {device}, and the ranks exchange tensors on {own}, over {groups.backend}: call "
                    f"model.move_model_to_device() before the first step, and make the optimizer after it; or train on "
                    f"the CPU, initialize_model_parallel(device='cpu')."
                )
            control = parallel_state.get_pipeline_control_group()
            self._transport = Transport(groups, control, device, failure_watch.report)
        elif self._transport.device.type != device.type:
            raise RuntimeError(
                f"the model is on {device}, and was on {self._transport.device} in the steps before: move it with "
                f"model.move_model_to_device(), or call refresh() on every rank after a move of its modules."
            )
        return self._transport

    def forget(self) -> None:
        """Drop all engines and the transport after a change of the stages: modules, ``requires_grad`` or device.

        All ranks of the pipeline must call this. The next step of each signature has a metadata exchange again.
        """
        self.known.clear()
        self._transport = None

    def make(
        self,
        program: RankStages,
        device: torch.device,
        signature: StepSignature,
        participants: Sequence[Participant] = (),
    ) -> Engine:
        """Return a new engine for ``program`` on ``device`` and steps of ``signature``."""
        rules = parallel_state.get_pipeline_transfer_groups().rules
        additions: list[Addition] = []
        added: dict[ActionKind, Callable[[Action], None]] = {}
        if device_of(device).is_lazy:
            # Before another action adds to the operations of this one.
            additions.append(Addition(Around.EACH, None, ActionKind.SUBMIT))
            added[ActionKind.SUBMIT] = lambda compute: device_of(device).submit()
        for each in reversed(participants):
            additions += each.additions
            added |= each.calls
        if not (self._schedule.overlaps and signature.train) or device_of(device).is_lazy:
            additions = [each for each in additions if each.around is not Around.PAIR]
        edges, train, microbatches = program.edges, signature.train, signature.microbatches
        key = edges, train, microbatches, tuple(additions)
        if key not in self._lowered:
            # With many ranks it takes seconds.
            compute = self._schedule.of(microbatches, train)
            lowered = rank_program(compute, self._rank, edges, rules, train, tuple(additions))
            # Sent activations that are held for the backward anyway need no limit.
            is_limited = not (train and self._keep_outputs)
            self._lowered[key] = lowered, in_flight_limit(compute, edges, rules, additions) if is_limited else None
        actions, in_flight = self._lowered[key]
        config = EngineConfig(
            *(self._schedule.placement, self._rank, microbatches, device, train, self._keep_outputs, in_flight),
            in_order=rules.posted_ahead is None,
            loss_gradient=self._loss_gradient,
            forms=signature.forms,
            graphs=signature.graphs,
        )
        recorder = None if self.timeline is None else self.timeline.recorder
        graphs = [graph.stages for graph in program.graphs or (program,)]
        for stage in (stages[number] for stages in graphs for number in sorted(stages)):
            for module in filter(None, (stage.module, stage.first_run)):
                for each in participants:
                    each.add_program(module)
        return Engine(config, graphs, self.transport(device), actions, recorder, added)

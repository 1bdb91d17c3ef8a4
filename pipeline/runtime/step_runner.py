"""Steps of one rank: verified to be the same on all ranks, and run by the engine for their signature."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

from nxdpp.devices.device import Compilations
from nxdpp.devices.kinds import device_of
from nxdpp.parallel_layers import failure_watch, parallel_state
from nxdpp.parallel_layers.average_plan import LastBackward
from nxdpp.parallel_layers.faults.board import board
from nxdpp.pipeline.agreement.input_hash import InputHasher
from nxdpp.pipeline.agreement.same_values import RankValues
from nxdpp.pipeline.agreement.step_signature import Forms, StepSignature, forms_of, input_shapes
from nxdpp.pipeline.agreement.step_verifier import StepIdentity, StepVerifier
from nxdpp.pipeline.agreement.tensor_ranks import verify_tensor_ranks
from nxdpp.pipeline.last_used import LastUsed
from nxdpp.pipeline.p2p.transport import Transport
from nxdpp.pipeline.runtime.engine import Engine, LastBackwardWatch
from nxdpp.pipeline.runtime.engine_config import EngineConfig
from nxdpp.pipeline.stages.loss import LossGradient, LossTransform
from nxdpp.pipeline.stages.program import RankProgram
from nxdpp.pipeline.timeline.clock import StepTimer
from nxdpp.pipeline.timeline.step_timeline import StepTimeline
from nxdpp.schedules.chosen import ChosenSchedule
from nxdpp.schedules.lowering.lowering import StagePair
from nxdpp.schedules.lowering.rank_program import RankProgram as LoweredProgram
from nxdpp.schedules.lowering.rank_program import in_flight_limit, rank_program
from nxdpp.schedules.lowering.transport_rules import TransportRules


class StepAverage(Protocol):
    """Average of gradients over the data-parallel replicas, as a training step sees it.

    Attributes:
        is_left_out: ``True`` in ``no_sync()``, which must be equal on all ranks.
    """

    is_left_out: bool

    def begin(self, last: Sequence[LastBackward]) -> LastBackwardWatch | None:
        """Begin with the ``last`` backward of each stage; ``None`` for a step in which nothing is averaged."""


class StepRunner:
    """The steps of this rank.

    Args:
        schedule: the schedule of the pipeline.
        rank: this rank of the pipeline.
        keep_outputs: hold sent activations until their backward.
        check_inputs: when floating inputs are compared: ``"first"``, ``"always"`` or ``"never"``.
        timeline_path: file for the timeline of each step; ``None`` writes none.
        loss_gradient: gives the gradient with which the backward of a microbatch's loss begins.
    """

    def __init__(
        self,
        schedule: ChosenSchedule,
        rank: int,
        keep_outputs: bool,
        check_inputs: str,
        timeline_path: Path | None = None,
        loss_gradient: LossGradient = torch.ones_like,
    ) -> None:
        self._timer: StepTimer | None = None
        self._compiled: Compilations | None = None
        self._compile_seconds = 0.0
        self._sent_before = 0
        # By the pairs of stages that exchange tensors, whether backwards follow, and the number of microbatches.
        self._lowered: dict[tuple[frozenset[StagePair], bool, int], tuple[LoweredProgram, int | None]] = {}
        self._schedule = schedule
        self._rank = rank
        self._keep_outputs = keep_outputs
        self._loss_gradient = loss_gradient
        self._transport: Transport | None = None
        self._timeline = None if timeline_path is None else StepTimeline(timeline_path, schedule.name)
        self._verifier: StepVerifier | None = None
        self._hasher = InputHasher(check_inputs)
        self._is_verified = False
        self._refused: str | None = None
        # By signature: each engine with the digest of its steps.
        self._engines: WeakKeyDictionary[RankProgram, LastUsed[Any, tuple[Engine, int]]] = WeakKeyDictionary()

    @property
    def busy_share(self) -> float:
        """Share of the last step, between 0 and 1, in which this rank computed; waits for its end."""
        return 0.0 if self._timer is None else self._timer.busy_share

    @property
    def seconds(self) -> float:
        """Seconds of the last step on the device, from its first action to its end; waits for the end."""
        return 0.0 if self._timer is None else self._timer.seconds

    @property
    def action_seconds(self) -> dict[str, float]:
        """Seconds of each compute action of the last step by its text, ``2F0``; empty on XLA."""
        return {} if self._timer is None else self._timer.action_seconds

    @property
    def sent_bytes(self) -> int:
        """Bytes of the tensors that this rank has sent to other ranks of the pipeline in the last step."""
        return 0 if self._transport is None else self._transport.sent_bytes - self._sent_before

    @property
    def compile_seconds(self) -> float:
        """Seconds in which this process compiled graphs, from the end of the step before to the end of the last."""
        return self._compile_seconds

    def transport(self, device: torch.device) -> Transport:
        """The transfers to other ranks of tensors on ``device``."""
        if self._transport is None:
            groups = parallel_state.get_pipeline_transfer_groups()
            control = parallel_state.get_pipeline_control_group()
            self._transport = Transport(groups, control, device, failure_watch.report)
        return self._transport

    @contextmanager
    def step(self) -> Iterator[None]:
        """Note an error of the block, the whole of a step on this rank.

        An error before the ranks have verified the step leaves this rank able to go on: it has sent nothing. The other
        ranks learn of it in the next step. A later error leaves engines in the middle of a step: they are dropped.

        Raises ``RuntimeError`` after a step that failed.
        """
        failure_watch.refuse_after_failure()
        self._is_verified = False
        try:
            yield
        except BaseException as error:
            if self._is_verified:
                self.forget_engines()
            else:
                self._refused = f"{board.position().call} raised {type(error).__name__}: {error}"
            raise

    def forget_engines(self) -> None:
        """Drop all engines and the transport after a change of the stages: modules, ``requires_grad`` or device.

        All ranks of the pipeline must call this. The next step of each signature has a metadata exchange again.
        """
        self._engines.clear()
        self._transport, self._sent_before = None, 0

    def run(
        self,
        program: RankProgram,
        microbatches: list[dict[str, Any]],
        given: Sequence[Mapping[str, Any]],
        device: torch.device,
        train: bool,
        origin: str | None,
        once_verified: Callable[[], None] | None = None,
        scales: Sequence[float] | None = None,
        values: RankValues | None = None,
        average: StepAverage | None = None,
        transform: LossTransform | None = None,
        may_differ: bool = False,
    ) -> list[list[Any]]:
        """Run one step; all ranks of the pipeline must call this.

        Args:
            program: the stages of this rank.
            microbatches: the model's inputs of each microbatch, for example ``input_ids`` of (B, T). Their number may
                be another one than that of the schedule.
            given: the inputs that are compared with those of other ranks: of the whole batch or of each microbatch.
            device: device of the stages.
            train: ``True`` if backwards follow.
            origin: the random numbers that this rank's initial weights are from; ``None`` when none were drawn.
            once_verified: called when all ranks are known to run the same step, before it; may be collective.
            values: of this rank's parameters, in the first step after a change of them; ``None`` in others.
            average: of the gradients of a training step. It begins once the step is verified.
            scales: factor of each microbatch's loss in the loss that is differentiated, by default that of a mean.
            transform: as that of ``Engine.run``.
            may_differ: ``True`` if each microbatch may have shapes of its own. By default all have those of the first.

        Returns:
            The results of each microbatch on the rank of the last stage, nothing on others.

        Raises:
            RuntimeError: when the ranks are about to run different steps. An error of the step itself is raised as it
                is, with a note.
        """
        if self._compiled is None:
            self._compiled = device_of(device).compiled()
        # Verify that all ranks run the same step.
        forms = forms_of(microbatches) if may_differ else Forms(input_shapes(microbatches[0]))
        count = len(microbatches)
        signature = StepSignature(forms.first, _autocast(device.type), train, forms.numbers, forms.others, count)
        engines = self._engines.setdefault(program, LastUsed())
        known = engines.get(signature)
        step = StepIdentity(program.graph, signature, origin)
        digest = step.digest if known is None else known[1]
        if self._verifier is None:
            self._verifier = StepVerifier(parallel_state.get_pipeline_control_group())
        with failure_watch.reported():
            inputs = self._hasher.of_step(given, known is None)
            begun = board.begun
            leaves_average = average is not None and average.is_left_out
            if self._rank == 0 and parallel_state.get_tensor_model_parallel_size() > 1:
                group = parallel_state.get_tensor_control_group()
                verify_tensor_ranks(group, signature, inputs, begun["pipeline"], known is None, leaves_average)
            begun["world"] = self._verifier.check(
                step,
                digest,
                known is None,
                inputs,
                begun["pipeline"],
                self._refused,
                values,
                begun["world"],
                leaves_average,
            )
        self._is_verified, self._refused = True, None
        if once_verified is not None:
            once_verified()
        # Run it.
        self._sent_before = self.transport(device).sent_bytes
        engine = self._engine(program, device, train, forms.numbers, count) if known is None else known[0]
        with failure_watch.reported(), nullcontext() if self._timeline is None else self._timeline.step(device, train):
            watch = None if average is None else average.begin(engine.last_backwards)
            results = engine.run(microbatches, scales, watch, transform)
        self._timer = engine.timer
        compiled = device_of(device).compiled()
        self._compile_seconds, self._compiled = compiled.seconds - self._compiled.seconds, compiled
        # Keep the engine of a new signature.
        if known is None:
            engines[signature] = engine, digest
        return results

    def _engine(
        self, program: RankProgram, device: torch.device, train: bool, forms: Sequence[int], microbatches: int
    ) -> Engine:
        rules = parallel_state.get_pipeline_transfer_groups().rules
        (actions, finished_sends), in_flight = self._lowered_for(program.edges, train, microbatches, rules)
        config = EngineConfig(
            self._schedule.placement,
            self._rank,
            microbatches,
            device,
            train,
            self._keep_outputs,
            in_flight,
            in_order=rules.posted_ahead is None,
            loss_gradient=self._loss_gradient,
            forms=forms,
        )
        recorder = None if self._timeline is None else self._timeline.recorder
        return Engine(config, program.stages, self.transport(device), actions, finished_sends, recorder)

    def _lowered_for(
        self, edges: frozenset[StagePair], train: bool, microbatches: int, rules: TransportRules
    ) -> tuple[LoweredProgram, int | None]:
        """Return the actions of this rank and the limit of sends in flight: seconds of work with many ranks, once."""
        key = edges, train, microbatches
        if key not in self._lowered:
            compute = self._schedule.of(microbatches, train)
            lowered = rank_program(compute, self._rank, edges, rules, train)
            # Sent activations that are held for the backward anyway need no limit.
            is_limited = not (train and self._keep_outputs)
            self._lowered[key] = lowered, in_flight_limit(compute, edges, rules) if is_limited else None
        return self._lowered[key]


def _autocast(device_type: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)

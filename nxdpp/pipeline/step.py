"""Steps of one rank: a batch is prepared, verified to be the same on all ranks, run by the engine, and finished.

::

    prepare    inputs ─▶ Batch ─ trace, cut ─▶ graph ─ count labels ─▶ PreparedStep     participants: before
    verify     all ranks of the pipeline run the same step, on the same inputs          participants: after
    run        actions of the stages and of participants
    finish     StepResult                                                               participants: finish
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from nxdpp.agreement.input_hash import InputHasher
from nxdpp.agreement.step_signature import StepSignature
from nxdpp.agreement.step_verifier import StepIdentity, StepVerifier
from nxdpp.agreement.tensor_ranks import verify_tensor_ranks
from nxdpp.devices.device import Compilations
from nxdpp.devices.kinds import device_of
from nxdpp.gradients.autocast import check_autocast
from nxdpp.gradients.replica_gradients import ReplicaGradients
from nxdpp.pipeline.batch import Batch
from nxdpp.pipeline.config import PipelineConfig
from nxdpp.pipeline.local.part import Part
from nxdpp.pipeline.loss.step_loss import StepLoss
from nxdpp.pipeline.loss.sum_of_rows import looked_at
from nxdpp.pipeline.microbatches.each_call import EachCall
from nxdpp.pipeline.participants import Participant, Participants, Step
from nxdpp.pipeline.prepared_step import PreparedStep, StepResult
from nxdpp.pipeline.runtime.engine import Engine
from nxdpp.pipeline.runtime.engines import Engines
from nxdpp.pipeline.timeline.clock import StepTimer
from nxdpp.ranks import current_state, parallel_state
from nxdpp.ranks.faults import background_errors, failure_watch
from nxdpp.ranks.faults.board import board

_Inputs = TypeVar("_Inputs")


class StepRunner:
    """The steps of one pipeline on this rank, each collective over the pipeline's ranks.

    Args:
        config: settings of the pipeline.
        last_rank: rank of the last stage.
        engines: run the programs.
        part: parameters, buffers and modules of this rank.
        replicas: the average of gradients.
        participants: take part in a step beside the stages.

    Attributes:
        timer: of the last step; ``None`` before the first one.
        compile_seconds: in which this process compiled graphs, from the end of the step before to the end of the last.
        digest: of the last step; equal for steps of the same graph and signature.
    """

    def __init__(
        self,
        config: PipelineConfig,
        last_rank: int,
        engines: Engines,
        part: Part,
        replicas: ReplicaGradients,
        participants: Participants,
    ) -> None:
        self.timer: StepTimer | None = None
        self._sent_before = 0
        self.compile_seconds = 0.0
        self.digest = 0
        self._config = config
        self._last_rank = last_rank
        self._engines = engines
        self._part = part
        self._replicas = replicas
        self._participants = participants
        self._hasher = InputHasher(config.check_inputs)
        self._verifier: StepVerifier | None = None
        self._compiled: Compilations | None = None
        self._has_tensor_ranks = parallel_state.get_tensor_model_parallel_size() > 1
        self._is_verified = False
        self._refused: str | None = None
        self._told: set[str] = set()

    @property
    def sent_bytes(self) -> int:
        """Bytes of the tensors that this rank has sent to other ranks of the pipeline in the last step."""
        return max(0, self._engines.sent_bytes - self._sent_before)

    def train(
        self, take: Callable[[_Inputs], Batch], inputs: _Inputs, prepare: Callable[[Batch], PreparedStep], average: bool
    ) -> StepResult:
        """Run the training step that ``prepare`` makes of the batch, which ``take`` makes of ``inputs``.

        ``average`` as ``Steps.train`` takes it. Raises as ``Steps.train`` does.
        """
        current_state.with_groups("a training step")
        background_errors.begin_step()
        with self._noted():
            if not torch.is_grad_enabled():
                raise RuntimeError("training needs gradients, and they are off (torch.no_grad()): evaluate there.")
            batch, device, scaler = take(inputs), self._part.changes.device, self._config.grad_scaler
            check_autocast(device, is_scaled=scaler is not None and scaler.is_enabled())
            self._part.check_trained()
            return self._run(Step(prepare(batch), device, True, average))

    def evaluate(
        self,
        take: Callable[[_Inputs], Batch],
        inputs: _Inputs,
        prepare: Callable[[Batch], PreparedStep],
        everywhere: bool = False,
    ) -> StepResult:
        """Run the evaluation that ``prepare`` makes of the batch, which ``take`` makes of ``inputs``.

        All ranks must want its results ``everywhere``, or none.

        It has no gradients, also in the caller's inference mode, whose tensors no training step could use later.
        """
        current_state.with_groups("an evaluation")
        with self._noted(), torch.inference_mode(mode=False), torch.no_grad():
            step = Step(prepare(take(inputs)), self._part.changes.device, False)
            check_autocast(step.device, is_scaled=True)
            return self._run(step, everywhere)

    def _run(self, step: Step, everywhere: bool = False) -> StepResult:
        """Run a step that this rank has prepared."""
        participants = self._participants.all if step.train else self._participants.evaluating
        for each in participants:
            each.before(step)
        # Verify.
        engine, step.digest = self._verify(step, everywhere)
        loss = step.prepared.loss
        if engine is None:
            step.engine, loss, each_call = self._first(step, participants)
        else:
            step.engine = engine
        for each in participants:
            each.after(step)
        # Run.
        self._sent_before = self._engines.transport(step.device).sent_bytes
        with failure_watch.reported(), self._engines.timeline(step.device, step.train):
            step.values = step.engine.run(loss)
        if engine is None:
            self._engines.of(step.prepared.program)[step.signature] = step.engine, step.digest
            if each_call is not None:
                each_call.warn(self._told)
        self.timer, self.digest = step.engine.timer, step.digest
        if step.engine.is_lazy:
            compiled = step.engine.device.compiled()
            assert self._compiled is not None, "set before the first verification"
            self.compile_seconds, self._compiled = compiled.seconds - self._compiled.seconds, compiled
        self._part.note_verified()
        # Finish.
        for each in participants:
            each.finish(step)
        return StepResult(step.prepared, step.values, self._last_rank, step.device)

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Note an error of the block, the whole of a step on this rank.

        After an error before the ranks have verified the step this rank can continue: it has sent nothing. The other
        ranks learn of it in the next step. A later error leaves engines in the middle of a step: they are dropped.

        Raises ``RuntimeError`` after a step that failed.
        """
        failure_watch.refuse_after_failure()
        self._is_verified = False
        try:
            yield
        except BaseException as error:
            for each in self._participants.all:
                each.abandon()
            if self._is_verified:
                self._engines.forget()
            else:
                self._refused = f"{board.position().call} raised {type(error).__name__}: {error}"
            raise

    def _verify(self, step: Step, everywhere: bool) -> tuple[Engine | None, int]:
        """Verify that all ranks of the pipeline run the same step, in its first run also on the same values.

        Sets the signature and the hashes of ``step``; returns its engine, if its signature has one, and its digest.
        Raises ``RuntimeError`` when the ranks are about to run different steps.
        """
        prepared, train = step.prepared, step.train
        if self._compiled is None:
            self._compiled = device_of(step.device).compiled()
        forms, count = prepared.forms(), len(prepared.loss.microbatches)
        kind = step.device.type
        autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        step.signature = StepSignature(
            *(forms.first, autocast, train, forms.numbers, forms.others, count, forms.graphs, everywhere)
        )
        identity = StepIdentity(prepared.program.graph, step.signature, self._part.initial.origin)
        engine, digest = self._engines.of(prepared.program).get(step.signature) or (None, identity.digest)
        if self._verifier is None:
            self._verifier = StepVerifier(parallel_state.get_pipeline_control_group())
        leaves_average = train and self._replicas.is_left_out
        begun, stream = board.begun, self._participants.draws.stream
        with failure_watch.reported():
            inputs = self._hasher.of_step(prepared.batch.compared, engine is None)
            if self._has_tensor_ranks and parallel_state.get_pipeline_model_parallel_rank() == 0:
                verify_tensor_ranks(
                    parallel_state.get_tensor_control_group(),
                    step.signature,
                    inputs,
                    begun["pipeline"],
                    engine is None,
                    leaves_average,
                    self._participants.draws.compared,
                    self._replicas.optimizers.rounds,
                )
            begun["world"] = self._verifier.check(
                identity,
                digest,
                engine is None,
                inputs,
                begun["pipeline"],
                self._refused,
                self._part.unverified_values(),
                begun["world"],
                leaves_average,
                self._part.tied.hooks_after if self._part.any_ties and train else None,
                0 if stream is None else stream.digest,
                self._replicas.optimizers.state,
            )
        self._is_verified, self._refused, step.hashes = True, None, inputs.values
        return engine, digest

    def _first(self, step: Step, participants: Sequence[Participant]) -> tuple[Engine, StepLoss, EachCall | None]:
        """Return a new engine, and the loss of its first step, which is looked at in training."""
        count, loss, each_call = len(step.prepared.loss.microbatches), step.prepared.loss, None
        if step.train and count > 1:
            each_call = EachCall(self._part.module, count)
            loss = looked_at(loss, self._config, self._told)
        return self._engines.make(step.prepared.program, step.device, step.signature, participants), loss, each_call

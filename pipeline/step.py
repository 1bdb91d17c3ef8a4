"""Steps of one rank: a batch is prepared, verified to be the same on all ranks, run by the engine, and finished.

::

    prepare    inputs ─▶ Batch ─ trace, cut ─▶ graph ─ count labels ─▶ PreparedStep
    verify     all ranks of the pipeline run the same step, on the same inputs; copies and replicas are equal
    run        actions of the stages
    finish     tied weights, reference, average over the replicas ─▶ StepResult
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

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
from nxdpp.pipeline.local.part import LocalPart
from nxdpp.pipeline.local.upkeep import LocalUpkeep
from nxdpp.pipeline.loss.step_loss import StepLoss
from nxdpp.pipeline.loss.sum_of_rows import looked_at
from nxdpp.pipeline.microbatches.each_call import EachCall
from nxdpp.pipeline.partition.partition import Partition
from nxdpp.pipeline.prepared_step import PreparedStep, StepResult
from nxdpp.pipeline.reference_step import ReferenceStep
from nxdpp.pipeline.runtime.engine import Engine
from nxdpp.pipeline.runtime.engines import Engines
from nxdpp.pipeline.timeline.clock import StepTimer
from nxdpp.ranks import current_state, parallel_state
from nxdpp.ranks.faults import background_errors, failure_watch
from nxdpp.ranks.faults.board import board
from nxdpp.ranks.group_values import extremes
from nxdpp.ranks.random_stream import RandomStream, stream_state_of
from nxdpp.tensor.sequence_parallel import StepGradients
from nxdpp.tensor.tensor_copies import TensorCopies

_Inputs = TypeVar("_Inputs")


class StepRunner:
    """The steps of one pipeline on this rank, each collective over the pipeline's ranks.

    Args:
        config: settings of the pipeline.
        partition: the stage of each layer and parameter.
        last_rank: rank of the last stage.
        engines: run the programs.
        part: parameters, buffers and modules of this rank.
        upkeep: makes the part ready for a step.
        replicas: the average of gradients.
        copies: parameters that each tensor-parallel rank has a copy of.

    Attributes:
        timer: of the last step; ``None`` before the first one.
        compile_seconds: in which this process compiled graphs, from the end of the step before to the end of the last.
        digest: of the last step; equal for steps of the same graph and signature.
    """

    def __init__(
        self,
        config: PipelineConfig,
        partition: Partition,
        last_rank: int,
        engines: Engines,
        part: LocalPart,
        upkeep: LocalUpkeep,
        replicas: ReplicaGradients,
        copies: TensorCopies,
    ) -> None:
        self.timer: StepTimer | None = None
        self._sent_before = 0
        self.compile_seconds = 0.0
        self.digest = 0
        self._config = config
        self._partition = partition
        self._last_rank = last_rank
        self._engines = engines
        self._part = part
        self._upkeep = upkeep
        self._replicas = replicas
        self._copies = copies
        self._sequence = StepGradients(part.module)
        self._hasher = InputHasher(config.check_inputs)
        self._verifier: StepVerifier | None = None
        self._compiled: Compilations | None = None
        self._has_tensor_ranks = parallel_state.get_tensor_model_parallel_size() > 1
        # One stage of one replica draws as one process does.
        sizes = parallel_state.get_pipeline_model_parallel_size(), parallel_state.get_data_parallel_size()
        self._place: tuple[int, int] | None = None
        self._has_replicas = sizes[1] > 1
        if sizes != (1, 1):
            self._place = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_data_parallel_rank()
        self._stream: RandomStream | None = None
        self._draws = stream_state_of(part.module)
        self._check_first = config.check_against_module is not None
        self._is_verified = False
        self._refused: str | None = None
        self._told: set[str] = set()
        self._each_call: EachCall | None = None

    @property
    def sent_bytes(self) -> int:
        """Bytes of the tensors that this rank has sent to other ranks of the pipeline in the last step."""
        return max(0, self._engines.sent_bytes - self._sent_before)

    def train(
        self, take: Callable[[_Inputs], Batch], inputs: _Inputs, prepare: Callable[[Batch], PreparedStep], average: bool
    ) -> StepResult:
        """Run the training step that ``prepare`` makes of the batch, which ``take`` makes of ``inputs``.

        ``average`` as ``Pipeline.train_step`` takes it. Raises as ``Pipeline.train_step`` does.
        """
        current_state.with_groups("a training step")
        background_errors.begin_step()
        with self._noted(), self._replicas.step(average):
            # Prepare.
            if not torch.is_grad_enabled():
                raise RuntimeError("training needs gradients, and they are off (torch.no_grad()): evaluate there.")
            batch, device = take(inputs), self._part.changes.device
            scaler = self._config.grad_scaler
            check_autocast(device, is_scaled=scaler is not None and scaler.is_enabled())
            self._upkeep.check_trained()
            if scaler is not None:
                scaler.begin_step(device)
            step = prepare(batch)
            reference = None
            if self._check_first:
                reference = ReferenceStep(self._part, self._partition.owners, self._config, device)
            # Verify.
            signature, digest, engine, hashes = self._verify(step, device, train=True)
            self._replicas.optimizers.begin_step()
            shards = self._engines.shards
            if shards is not None:
                shards.drop_cleared()
            if self._part.tied.has_weights:
                self._part.tied.set_aside()
            if self._has_tensor_ranks:
                self._sequence.set_aside()
                self._copies.verify(self._part.seed)
            self._replicas.verify(() if self._config.check_inputs == "never" else hashes)
            if reference is not None:
                reference.run(step.loss, step.whole(self._config))
            # Run, and add up the gradients of several ranks.
            engine, values = self._run(step, signature, digest, engine, device)
            if shards is not None:
                with failure_watch.reported():
                    shards.finish()
            if self._has_tensor_ranks or self._part.tied.parameters:
                with failure_watch.reported():
                    self._sequence.add_up(engine.microbatches)
                    self._part.tied.add_up(self._engines.transport(device), engine.microbatches)
            # Compare with the reference, and average over the replicas.
            if reference is not None:
                losses = [(cut, cut.loss_of_sample(self._config.output_loss_value_spec)) for cut in step.graphs.cuts]
                plans = [plan for cut, loss in losses for plan in cut.plans([loss])]
                reference.compare([each[0] for each in values if each], plans)
                self._check_first = False
            self._replicas.finish()
            if shards is not None and not self._replicas.is_averaged:
                shards.keep()
            stream, self._stream = self._stream, None
            if stream is not None and stream.moves is None:
                self._settle_draws(stream, train=True)
            return StepResult(step, values, self._last_rank, device)

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
            step, device = prepare(take(inputs)), self._part.changes.device
            check_autocast(device, is_scaled=True)
            signature, digest, engine, _ = self._verify(step, device, train=False, everywhere=everywhere)
            _, values = self._run(step, signature, digest, engine, device)
            stream, self._stream = self._stream, None
            if stream is not None and stream.moves is None:
                self._settle_draws(stream, train=False)
            return StepResult(step, values, self._last_rank, device)

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
            self._part.tied.put_back()
            self._sequence.put_back()
            if self._engines.shards is not None:
                self._engines.shards.abandon()
            if self._is_verified:
                self._engines.forget()
            else:
                self._refused = f"{board.position().call} raised {type(error).__name__}: {error}"
            raise

    def _verify(
        self, step: PreparedStep, device: torch.device, train: bool, everywhere: bool = False
    ) -> tuple[StepSignature, int, Engine | None, Sequence[int]]:
        """Verify that all ranks of the pipeline run the same step, in its first run also on the same values.

        Returns the step's signature, its digest, its engine, and hashes of its inputs. A new signature has no engine.
        Raises ``RuntimeError`` when the ranks are about to run different steps.
        """
        if self._compiled is None:
            self._compiled = device_of(device).compiled()
        forms, count = step.forms(), len(step.loss.microbatches)
        autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        signature = StepSignature(
            *(forms.first, autocast, train, forms.numbers, forms.others, count, forms.graphs, everywhere)
        )
        identity = StepIdentity(step.program.graph, signature, self._part.origin)
        known = self._engines.of(step.program).get(signature)
        engine, digest = known or (None, identity.digest)
        is_new = engine is None
        if self._verifier is None:
            self._verifier = StepVerifier(parallel_state.get_pipeline_control_group())
        leaves_average = train and self._replicas.is_left_out
        begun = board.begun
        kind = f"train={train}, training={step.graphs.cuts[0].training}"
        self._stream = None if self._place is None else RandomStream(device_of(device), self._place, kind, self._draws)
        with failure_watch.reported():
            inputs = self._hasher.of_step(step.batch.compared, is_new)
            if self._has_tensor_ranks and parallel_state.get_pipeline_model_parallel_rank() == 0:
                group = parallel_state.get_tensor_control_group()
                rounds = self._replicas.optimizers.rounds
                drawn = 0 if self._stream is None else self._stream.compared
                verify_tensor_ranks(group, signature, inputs, begun["pipeline"], is_new, leaves_average, drawn, rounds)
            begun["world"] = self._verifier.check(
                identity,
                digest,
                is_new,
                inputs,
                begun["pipeline"],
                self._refused,
                self._upkeep.unverified_values(),
                begun["world"],
                leaves_average,
                self._part.tied.hooks_after if self._part.any_ties and train else None,
                0 if self._stream is None else self._stream.digest,
                self._replicas.optimizers.state,
            )
        self._is_verified, self._refused = True, None
        return signature, digest, engine, inputs.values

    def _run(
        self,
        step: PreparedStep,
        signature: StepSignature,
        digest: int,
        engine: Engine | None,
        device: torch.device,
    ) -> tuple[Engine, list[list[Any]]]:
        """Run the actions of the stages; return the results of each microbatch on the rank of the last stage.

        An error of the step is raised as it is, with a note.
        """
        self._sent_before = self._engines.transport(device).sent_bytes
        running, loss = (engine, step.loss) if engine else self._first(step, signature, device)
        with failure_watch.reported(), self._engines.timeline(device, signature.train):
            watch = self._replicas.begin(running.last_backwards) if signature.train else None
            if self._engines.shards is not None:
                lines = self._replicas.lines_of_step() if signature.train else ()
                rounds = self._replicas.optimizers.rounds
                self._engines.shards.begin(signature.train, self._replicas.is_averaged, lines, rounds)
            if self._stream is None:
                values = running.run(loss, watch)
            else:
                try:
                    self._stream.begin()
                    values = running.run(loss, watch)
                finally:
                    self._stream.end()
        self.timer, self.digest = running.timer, digest
        if running.is_lazy:
            compiled = running.device.compiled()
            assert self._compiled is not None, "set before the first verification"
            self.compile_seconds, self._compiled = compiled.seconds - self._compiled.seconds, compiled
        if engine is None:
            self._engines.of(step.program)[signature] = running, digest
            if self._each_call is not None:
                self._each_call.warn(self._told)
        self._upkeep.note_verified()
        return running, values

    def _first(self, step: PreparedStep, signature: StepSignature, device: torch.device) -> tuple[Engine, StepLoss]:
        """Return a new engine, and the loss of its first step, which is looked at in training."""
        count, loss = len(step.loss.microbatches), step.loss
        self._each_call = None
        if signature.train and count > 1:
            self._each_call = EachCall(self._part.module, count)
            loss = looked_at(loss, self._config, self._told)
        return self._engines.make(step.program, device, signature), loss

    def _settle_draws(self, stream: RandomStream, train: bool) -> None:
        """Agree after the first step of a kind whether layers draw in such steps; collective over the model's ranks.

        An evaluation is collective over those of its pipeline, since each replica may make its own.
        """
        with failure_watch.reported():
            moves = bool(extremes([stream.has_drawn], parallel_state.get_pipeline_control_group())[1][0])
        if self._has_replicas:
            moves = train and self._replicas.is_in_any("comparison of random numbers", moves)
        stream.settle(moves)

"""Steps of a wrapped model on this rank: of a batch, of microbatches as they are, or of samples.

::

    prepare    inputs ─ Batches ─▶ Batch ─ StepPreparation ─▶ Step                      participants: before
    verify     all ranks of the pipeline run the same step, on the same inputs          participants: after
    run        actions of the stages and of participants
    finish     losses or outputs                                                        participants: finish
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from nxdpp.agreement.exchange import ReplicaExchanges
from nxdpp.agreement.input_hash import InputHasher
from nxdpp.agreement.step_signature import Forms, LastUsed, StepSignature, forms_of, input_shapes
from nxdpp.agreement.step_verifier import StepIdentity, StepVerifier
from nxdpp.agreement.tensor_ranks import verify_tensor_ranks
from nxdpp.devices.device import Compilations
from nxdpp.devices.kinds import device_of
from nxdpp.gradients.autocast import check_autocast
from nxdpp.gradients.average import mean_loss
from nxdpp.gradients.gradient_norm import clip_grad_norm, dtype_of_norm
from nxdpp.gradients.replica_gradients import ReplicaGradients
from nxdpp.gradients.shards.rank_shards import RankShards
from nxdpp.pipeline.batch import Batch, Batches
from nxdpp.pipeline.config import PipelineConfig
from nxdpp.pipeline.local.part import Part
from nxdpp.pipeline.loss.normalization import LossNormalization
from nxdpp.pipeline.loss.sum_of_rows import looked_at
from nxdpp.pipeline.microbatches.mixed_rows import EachCall
from nxdpp.pipeline.participants import Participants
from nxdpp.pipeline.partition.partition import Partition
from nxdpp.pipeline.runtime.engine import Engine
from nxdpp.pipeline.runtime.engines import Engines
from nxdpp.pipeline.stages.loss import LossTransform
from nxdpp.pipeline.stages.program_cache import ProgramCache
from nxdpp.pipeline.step import Step, StepPreparation
from nxdpp.pipeline.timeline.clock import StepTimer
from nxdpp.ranks import current_state, parallel_state
from nxdpp.ranks.faults import background_errors, failure_watch
from nxdpp.ranks.faults.board import Call, board
from nxdpp.schedules.chosen import ChosenSchedule
from nxdpp.tensor.tensor_copies import TensorCopies

_Inputs = TypeVar("_Inputs")


class Steps:
    """The steps of one wrapped model, each collective over the ranks of its pipeline.

    Args:
        config: settings of the model.
        partition: the stage of each layer and parameter.
        schedule: the schedule with its placement of stages on ranks.
        part: parameters, buffers and modules of this rank; the steps follow its changes.
        programs: graphs and programs, by specs of inputs.
        normalization: of the loss.
        exchanges: with the data-parallel replicas.

    Attributes:
        last_rank: rank of the last stage.
        local_stages: of this rank, in the order of the model.
        engines: run the programs.
        participants: of the steps.
        replicas: the average of gradients over the data-parallel replicas.
        timer: of the last step; ``None`` before the first one.
        compile_seconds: in which this process compiled graphs, from the end of the step before to the end of the last.
        digest: of the last step; equal for steps of the same graph and signature.
    """

    def __init__(
        self,
        config: PipelineConfig,
        partition: Partition,
        schedule: ChosenSchedule,
        part: Part,
        programs: ProgramCache,
        normalization: LossNormalization,
        exchanges: ReplicaExchanges,
    ) -> None:
        self.config, self.partition, self.schedule, self.part = config, partition, schedule, part
        self.exchanges = exchanges
        self.last_rank = schedule.placement.rank_of(partition.stages - 1)
        self.local_stages = schedule.placement.stages_of(part.rank)
        self.engines = Engines(config, schedule, part.rank)
        self.programs = programs
        self.replicas = ReplicaGradients(part, exchanges, config.gradient_reduction == "mean")
        self._copies = TensorCopies(part.module)
        self.participants = Participants(
            *(config, partition, part, self.replicas, self._copies, self.engines.transport, schedule.name)
        )
        self._loss_dtypes: LastUsed[int, torch.dtype] = LastUsed()
        self._batches = Batches(part, config, normalization)
        self._preparation = StepPreparation(config, programs, normalization)
        self.timer: StepTimer | None = None
        self.compile_seconds = 0.0
        self.digest = 0
        self._hasher = InputHasher(config.check_inputs)
        self._verifier: StepVerifier | None = None
        self._compiled: Compilations | None = None
        self._has_tensor_ranks = parallel_state.get_tensor_model_parallel_size() > 1
        self._is_verified = False
        self._refused: str | None = None
        self._told: set[str] = set()
        part.follower = self

    def trace(self, inputs: Mapping[str, Any]) -> None:
        """Trace a microbatch of ``inputs``, a whole batch, in the present training mode; not collective."""
        batch = self._batches.of_trace(inputs)
        training = self.part.root.training
        with torch.set_grad_enabled(training):
            self._preparation.trace(batch, training)

    def expect_inputs(self, names: Sequence[str]) -> None:
        """Take exactly the inputs ``names`` in each step from now on. Raises ``ValueError`` for names of no inputs."""
        self.config.check_input_names(names)
        self._batches.input_names = tuple(names)

    def train(
        self, inputs: Mapping[str, Any] | Sequence[Mapping[str, Any]], average: bool, are_parts: bool = False
    ) -> list[torch.Tensor]:
        """Run forward and backward of a batch, as a part of the collective call that the program is in.

        Gradients of the loss are added to ``.grad``. With ``average`` they are averaged over the data-parallel
        replicas. This begins during the last backwards. The first step compares the replicas' parameters: collective
        over all ranks.

        Returns:
            The detached loss of each microbatch on the rank of the last stage, an empty list on others. Their mean is
            the loss.

        Takes ``inputs`` and raises as ``NxDPPModel.run_train`` does; with ``are_parts`` they are microbatches as they
        are, as ``run_train_microbatches`` takes them.
        """
        take: Callable[[Any], Batch] = self._batches.of_microbatches if are_parts else self._batches.of_inputs
        return self._train(take, inputs, self._preparation.with_loss, average).losses()

    def evaluate(self, inputs: Mapping[str, Any], everywhere: bool = False) -> tuple[list[torch.Tensor] | None, Any]:
        """Run the forward of all microbatches without gradients, as a part of the collective call of the program.

        Takes and refuses ``inputs`` as ``train`` does, but any number of rows: some microbatches then have a row more
        than others, and weigh as much more in a mean. With ``everywhere`` all ranks of the pipeline get the losses or
        the output, each a copy.

        Returns:
            The loss of each microbatch, whose mean is the loss, where the model's output names a loss, or is one tensor
            of shape (); otherwise ``None``, and the model's output, with the microbatches joined as ``joined_outputs``
            says. Both are empty on ranks without the last stage, unless they are wanted everywhere.
        """
        step = self._evaluate(self._batches.of_evaluation, inputs, self._preparation.with_named_loss, everywhere)
        if step.has_loss:
            return step.shared_losses() if everywhere else step.losses(), None
        losses = step.lone_losses()
        if losses is not None:
            with failure_watch.reported():
                scaled = self._preparation.loss_of(step).scaled(losses)
                return step.shared(scaled) if everywhere else scaled, None
        outputs = step.outputs(everywhere)
        with failure_watch.reported():
            return None, self._batches.joined(outputs, step.batch, step.graphs) if outputs else None

    def train_samples(
        self, samples: Sequence[Mapping[str, Any]], transform: LossTransform | None = None, average: bool = True
    ) -> list[Any]:
        """Run forward and backward of ``samples``, each a microbatch as it is; collective over the pipeline.

        Gradients are of the mean of the samples' losses, or of their sum with ``gradient_reduction="sum"``. A loss is
        the first value of a tuple, unless ``output_loss_value_spec`` marks another.

        Args:
            samples: the model's inputs by name of each of the ``num_microbatches`` samples, equal on all ranks of the
                pipeline. Nothing is split. Inputs may be nested dicts, lists, tuples, named tuples and dataclasses.
                Samples may differ in sizes, dtypes and structure: each has the graph that it needs. The first step with
                each new mix takes longer.
            transform: a function of the number of a sample and its loss, a tensor of one element. It returns the loss
                whose gradient is taken. ``loss * 0.0`` gives zeros as gradients. The rank of the last stage calls it.
            average: as in ``train``.

        Returns:
            The detached output of each sample on every rank of the pipeline, as the model returns it. Nothing is
            divided or transformed. All ranks but the last wait for it.

        Raises:
            ValueError: with ``loss_normalization="tokens"``, whose losses depend on all samples together.
            ValueError, TypeError: for a wrong number of samples, and as ``train`` does.
            TracingError, RuntimeError: as ``train`` does.
        """
        with _call("train_samples"):
            prepare = partial(self._preparation.with_loss_and_output, transform=transform)
            step = self._train(self._batches.of_samples, samples, prepare, average)
            with failure_watch.reported():
                # Raises for a loss that is not-a-number for lack of labels.
                step.losses()
            return step.outputs()

    def eval_samples(self, samples: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Run the forward of ``samples`` without gradients; collective over the pipeline.

        Takes, returns and refuses as ``train_samples`` does.
        """
        with _call("eval_samples"):
            return self._evaluate(self._batches.of_samples, samples, self._preparation.with_output).outputs()

    def takes_number_of_items(self, microbatch: Mapping[str, Any]) -> bool:
        """Return whether the loss of ``microbatch`` depends on the ``num_items_in_batch`` in it; not collective."""
        return self._preparation.takes_number_of_items(self._batches.of_microbatches([microbatch]))

    def train_microbatches(
        self,
        microbatches: Sequence[Mapping[str, Any]],
        transform: LossTransform | None = None,
        average: bool = True,
        outputs: bool = False,
    ) -> list[Any]:
        """Run forward and backward of ``microbatches`` as they are; collective over the pipeline.

        Gradients and losses are as in ``train``. The microbatches may differ as samples do, and their number from step
        to step: a number other than ``num_microbatches`` has a schedule of its own.

        Args:
            microbatches: the model's inputs by name of each, at least one, equal on all ranks of the pipeline.
            transform: as in ``train_samples``. The returned losses are not transformed.
            average: as in ``train``.
            outputs: return the whole output of each in place of its loss, as ``eval_microbatches`` does.

        Returns:
            The detached loss of each microbatch on every rank of the pipeline. Their mean is the loss. All ranks but
            the last wait for it.

        Raises:
            ValueError, TypeError, TracingError, RuntimeError: as ``train`` does. ``ValueError`` also for a number of
                microbatches that the schedule cannot run.
        """
        with _call("train_microbatches"):
            with_output = partial(self._preparation.with_loss_and_output, transform=transform)
            prepare = with_output if outputs else partial(self._preparation.with_loss, transform=transform)
            step = self._train(self._batches.of_microbatches, microbatches, prepare, average)
            return step.outputs() if outputs else step.shared_losses()

    def eval_microbatches(self, microbatches: Sequence[Mapping[str, Any]], outputs: bool = False) -> list[Any]:
        """Run the forward of ``microbatches`` without gradients; collective over the pipeline.

        Takes and raises as ``train_microbatches`` does. Returns the loss of each microbatch on every rank of the
        pipeline, as the model returns it. With ``outputs`` it returns the whole output in place of that.
        """
        with _call("eval_microbatches"):
            prepare = self._preparation.with_output if outputs else self._preparation.with_losses
            step = self._evaluate(self._batches.of_microbatches, microbatches, prepare)
            return step.outputs() if outputs else step.shared_losses()

    def mean_loss(self, losses: Sequence[torch.Tensor], train: bool = True) -> torch.Tensor:
        """Return the mean loss of all microbatches and replicas on every rank; collective over all ranks.

        ``losses`` are the result of a step on this rank, a training step or an evaluation. The mean has their dtype.
        """
        with board.call("mean_loss"), failure_watch.reported():
            if self.part.rank == self.last_rank:
                self.exchanges.begin(f"mean loss of {'a training step' if train else 'an evaluation'}")
            known = self._loss_dtypes.get(self.digest)
            loss = mean_loss(losses, self.last_rank, self.part.device, known)
            self._loss_dtypes[self.digest] = loss.dtype
            return loss

    def average_gradients(self) -> None:
        """Average ``.grad`` over the data-parallel replicas; collective over them.

        Raises ``RuntimeError`` for replicas with other parameters than the first.
        """
        with board.call("average_gradients"), failure_watch.reported():
            self.replicas.verify()
            self.replicas.average()

    def clip_grad_norm(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """Scale the gradients of the whole model so that their norm is ``max_norm`` at most; return the norm before.

        Collective over all ranks, after the average over replicas. Takes, returns and raises as
        ``parallel_layers.clip_grad_norm`` does. Raises ``RuntimeError`` for gradients that ``grad_scaler`` has scaled,
        or that are not averaged.
        """
        self.replicas.check_averaged()
        if self.config.grad_scaler is not None:
            self.config.grad_scaler.check_unscaled()
        with board.call("clip_grad_norm"):
            parameters = list(self.part.module.parameters())
            own = dtype_of_norm(each.grad for each in parameters if each.grad is not None)
            dtype = self.replicas.optimizers.note_clipping(float(max_norm), float(norm_type), own)
            return clip_grad_norm(parameters, max_norm, norm_type, dtype=dtype)

    def _train(
        self, take: Callable[[_Inputs], Batch], inputs: _Inputs, prepare: Callable[[Batch], Step], average: bool
    ) -> Step:
        """Run the training step that ``prepare`` makes of the batch, which ``take`` makes of ``inputs``."""
        current_state.with_groups("a training step")
        background_errors.begin_step()
        with self._noted():
            if not torch.is_grad_enabled():
                raise RuntimeError("training needs gradients, and they are off (torch.no_grad()): evaluate there.")
            batch, device, scaler = take(inputs), self.part.changes.device, self.config.grad_scaler
            check_autocast(device, is_scaled=scaler is not None and scaler.is_enabled())
            self.part.check_trained()
            return self._run(prepare(batch), device, True, average)

    def _evaluate(
        self,
        take: Callable[[_Inputs], Batch],
        inputs: _Inputs,
        prepare: Callable[[Batch], Step],
        everywhere: bool = False,
    ) -> Step:
        """Run the evaluation that ``prepare`` makes of the batch, which ``take`` makes of ``inputs``.

        All ranks must want its results ``everywhere``, or none.

        It has no gradients, also in the caller's inference mode, whose tensors no training step could use later.
        """
        current_state.with_groups("an evaluation")
        with self._noted(), torch.inference_mode(mode=False), torch.no_grad():
            step, device = prepare(take(inputs)), self.part.changes.device
            check_autocast(device, is_scaled=True)
            return self._run(step, device, False, everywhere=everywhere)

    def _run(
        self, step: Step, device: torch.device, train: bool, average: bool = False, everywhere: bool = False
    ) -> Step:
        """Run a step that this rank has prepared, and return it."""
        step.device, step.train, step.average, step.last_rank = device, train, average, self.last_rank
        participants = self.participants.all if train else self.participants.evaluating
        for each in participants:
            each.before(step)
        # Verify.
        known, step.digest = self._verify(step, everywhere)
        loss, each_call = step.loss, None
        if known is None and train and len(loss.microbatches) > 1:
            each_call = EachCall(self.part.module, len(loss.microbatches))
            loss = looked_at(loss, self.config, self._told)
        step.engine = known or self.engines.make(step.program, device, step.signature, participants)
        for each in participants:
            each.after(step)
        # Run.
        timeline = self.engines.timeline
        recorded = nullcontext() if timeline is None else timeline.step(device, train, self.participants.told)
        with failure_watch.reported(), recorded:
            step.values = step.engine.run(loss)
        if known is None:
            of_program = self.engines.known.setdefault(step.program, LastUsed())
            of_program[device.type, step.signature] = step.engine, step.digest
        if each_call is not None:
            each_call.warn(self._told)
        self.timer, self.digest = step.engine.timer, step.digest
        if step.engine.is_lazy:
            compiled = step.engine.device.compiled()
            assert self._compiled is not None, "set before the first verification"
            self.compile_seconds, self._compiled = compiled.seconds - self._compiled.seconds, compiled
        self.part.note_verified()
        # Finish.
        for each in participants:
            each.finish(step)
        return step

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
            for each in self.participants.all:
                each.abandon()
            if self._is_verified:
                self.engines.forget()
            else:
                self._refused = f"{board.position().call} raised {type(error).__name__}: {error}"
            raise

    def _verify(self, step: Step, everywhere: bool) -> tuple[Engine | None, int]:
        """Verify that all ranks of the pipeline run the same step, in its first run also on the same values.

        Sets the signature and the hashes of ``step``; returns its engine, if its signature has one, and its digest.
        Raises ``RuntimeError`` when the ranks are about to run different steps.
        """
        batch, microbatches, kind = step.batch, step.loss.microbatches, step.device.type
        if self._compiled is None:
            self._compiled = device_of(step.device).compiled()
        if len(batch.distinct) == 1:
            forms = Forms(batch.shapes or input_shapes(microbatches[0]))
        else:
            forms = forms_of(microbatches, step.graphs.numbers)
        autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        step.signature = StepSignature(
            *(forms.first, autocast, step.train, forms.numbers, forms.others),
            *(len(microbatches), forms.graphs, everywhere),
        )
        identity = StepIdentity(step.program.graph, step.signature, self.part.initial.origin)
        engines: Mapping[Any, tuple[Engine, int]] = self.engines.known.get(step.program, {})
        engine, digest = engines.get((kind, step.signature)) or (None, identity.digest)
        if self._verifier is None:
            self._verifier = StepVerifier(parallel_state.get_pipeline_control_group())
        begun, draws, optimizers = board.begun, self.participants.draws, self.replicas.optimizers
        number, is_new, leaves_average = begun["pipeline"], engine is None, step.train and self.replicas.is_left_out
        with failure_watch.reported():
            inputs = self._hasher.of_step(batch.compared, is_new)
            if self._has_tensor_ranks and self.part.rank == 0:
                verify_tensor_ranks(
                    *(parallel_state.get_tensor_control_group(), step.signature, inputs, number, is_new),
                    *(leaves_average, draws.compared, optimizers.rounds),
                )
            begun["world"] = self._verifier.check(
                *(identity, digest, is_new, inputs, number, self._refused, self.part.unverified_values()),
                *(begun["world"], leaves_average),
                self.part.tied.hooks_after if self.part.any_ties and step.train else None,
                *(0 if draws.stream is None else draws.stream.digest, optimizers.state),
            )
        self._is_verified, self._refused, step.hashes = True, None, inputs.values
        return engine, digest

    def shard(self, shards: RankShards) -> None:
        """Run ``shards``, which this rank's parameters have become, from the next step on; on all ranks."""
        self.participants.add_shards(shards)
        self.part.shard(shards)

    def replace(self, replaced: Mapping[str, nn.Module]) -> None:
        """Run the modules that were replaced, by name."""
        self.programs.replace(replaced)

    def forget(self) -> None:
        """Forget what was made of this rank's part before a change."""
        self.replicas.follow()
        self.programs.forget()
        self.engines.forget()
        self._loss_dtypes.clear()

    def verify_again(self) -> None:
        """Have the ranks compare the parameters again."""
        self.replicas.verify_again()
        self._copies.verify_again()


def _call(name: str) -> Call:
    return board.call(name, "step", "pipeline", has_limit=True)

"""Steps of a wrapped model on this rank: of a batch, of microbatches as they are, or of samples.

::

    inputs ─ Batches ─▶ Batch ─ StepPreparation ─▶ PreparedStep ─ StepRunner ─▶ StepResult ─▶ losses or outputs
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from nxdpp.agreement.exchange import ReplicaExchanges
from nxdpp.agreement.last_used import LastUsed
from nxdpp.gradients.gradient_norm import clip_grad_norm, dtype_of_norm
from nxdpp.gradients.mean_loss import mean_loss
from nxdpp.gradients.replica_gradients import ReplicaGradients
from nxdpp.gradients.shards.rank_shards import RankShards
from nxdpp.pipeline.batch import Batches
from nxdpp.pipeline.config import PipelineConfig
from nxdpp.pipeline.local.part import Part
from nxdpp.pipeline.loss.normalization import LossNormalization
from nxdpp.pipeline.participants import Participants
from nxdpp.pipeline.partition.partition import Partition
from nxdpp.pipeline.prepared_step import Evaluation, StepPreparation
from nxdpp.pipeline.runtime.engines import Engines
from nxdpp.pipeline.stages.loss import LossTransform
from nxdpp.pipeline.stages.program_cache import ProgramCache
from nxdpp.pipeline.step import StepRunner
from nxdpp.ranks.faults import failure_watch
from nxdpp.ranks.faults.board import Call, board
from nxdpp.schedules.chosen import ChosenSchedule
from nxdpp.tensor.tensor_copies import TensorCopies


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
        replicas: the average of gradients over the data-parallel replicas.
        runner: runs the steps; it has the figures of the last one.
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
        self._participants = Participants(config, partition, part, self.replicas, self._copies, self.engines.transport)
        self._loss_dtypes: LastUsed[int, torch.dtype] = LastUsed()
        self._batches = Batches(part, config, normalization)
        self._preparation = StepPreparation(config, programs, normalization)
        self.runner = StepRunner(config, self.last_rank, self.engines, part, self.replicas, self._participants)
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

    def train(self, inputs: Mapping[str, Any], average: bool) -> list[torch.Tensor]:
        """Run forward and backward of a batch, as a part of the collective call that the program is in.

        Gradients of the loss are added to ``.grad``. With ``average`` they are averaged over the data-parallel
        replicas. This begins during the last backwards. The first step compares the replicas' parameters: collective
        over all ranks.

        Returns:
            The detached loss of each microbatch on the rank of the last stage, an empty list on others. Their mean is
            the loss.

        Takes ``inputs`` and raises as ``NxDPPModel.run_train`` does.
        """
        return self.runner.train(self._batches.of_inputs, inputs, self._preparation.with_loss, average).losses()

    def train_given(self, microbatches: Sequence[Mapping[str, Any]], average: bool) -> list[torch.Tensor]:
        """Do as ``train`` for ``microbatches`` as they are."""
        prepare = self._preparation.with_loss
        return self.runner.train(self._batches.of_microbatches, microbatches, prepare, average).losses()

    def evaluate(self, inputs: Mapping[str, Any], everywhere: bool = False) -> Evaluation:
        """Run the forward of all microbatches without gradients, as a part of the collective call of the program.

        Takes and refuses ``inputs`` as ``train`` does, but any number of rows: some microbatches then have a row more
        than others, and weigh as much more in a mean. With ``everywhere`` all ranks of the pipeline get the losses or
        the output, each a copy.
        """
        prepare = self._preparation.with_named_loss
        result = self.runner.evaluate(self._batches.of_evaluation, inputs, prepare, everywhere)
        if result.step.has_loss:
            return Evaluation(result.shared_losses() if everywhere else result.losses())
        losses = result.lone_losses()
        if losses is not None:
            with failure_watch.reported():
                scaled = self._preparation.loss_of(result.step).scaled(losses)
                return Evaluation(result.shared(scaled) if everywhere else scaled)
        outputs = result.shared_outputs() if everywhere else result.outputs()
        with failure_watch.reported():
            step = result.step
            return Evaluation(None, self._batches.joined(outputs, step.batch, step.graphs) if outputs else None)

    def train_samples(
        self,
        samples: Sequence[Mapping[str, Any]],
        transform: LossTransform | None = None,
        average: bool = True,
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
            result = self.runner.train(self._batches.of_samples, samples, prepare, average)
            with failure_watch.reported():
                # Raises for a loss that is not-a-number for lack of labels.
                result.losses()
            return result.shared_outputs()

    def eval_samples(self, samples: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Run the forward of ``samples`` without gradients; collective over the pipeline.

        Takes, returns and refuses as ``train_samples`` does.
        """
        with _call("eval_samples"):
            prepare = self._preparation.with_output
            return self.runner.evaluate(self._batches.of_samples, samples, prepare).shared_outputs()

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
            prepared = self._preparation.with_loss_and_output if outputs else self._preparation.with_loss
            prepare = partial(prepared, transform=transform)
            result = self.runner.train(self._batches.of_microbatches, microbatches, prepare, average)
            return result.shared_outputs() if outputs else result.shared_losses()

    def eval_microbatches(self, microbatches: Sequence[Mapping[str, Any]], outputs: bool = False) -> list[Any]:
        """Run the forward of ``microbatches`` without gradients; collective over the pipeline.

        Takes and raises as ``train_microbatches`` does. Returns the loss of each microbatch on every rank of the
        pipeline, as the model returns it. With ``outputs`` it returns the whole output in place of that.
        """
        with _call("eval_microbatches"):
            prepare = self._preparation.with_output if outputs else self._preparation.with_losses
            result = self.runner.evaluate(self._batches.of_microbatches, microbatches, prepare)
            return result.shared_outputs() if outputs else result.shared_losses()

    def mean_loss(self, losses: Sequence[torch.Tensor], train: bool = True) -> torch.Tensor:
        """Return the mean loss of all microbatches and replicas on every rank; collective over all ranks.

        ``losses`` are the result of a step on this rank, a training step or an evaluation. The mean has their dtype.
        """
        with board.call("mean_loss"), failure_watch.reported():
            if self.part.rank == self.last_rank:
                self.exchanges.begin(f"mean loss of {'a training step' if train else 'an evaluation'}")
            known = self._loss_dtypes.get(self.runner.digest)
            loss = mean_loss(losses, self.last_rank, self.part.device, known)
            self._loss_dtypes[self.runner.digest] = loss.dtype
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

    def shard(self, shards: RankShards) -> None:
        """Run ``shards``, which this rank's parameters have become, from the next step on; on all ranks."""
        self._participants.add_shards(shards)
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

"""Training steps and evaluations of a pipeline.

::

    inputs or samples ─ StepPreparation ─▶ PreparedStep ─ StepRuns ─▶ losses, or outputs on all ranks
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nxdpp.parallel_layers import failure_watch
from nxdpp.pipeline.local.next_step import NextStep
from nxdpp.pipeline.local.part import LocalPart
from nxdpp.pipeline.local.upkeep import LocalUpkeep
from nxdpp.pipeline.microbatches.rows import join_outputs, readable_inputs
from nxdpp.pipeline.pipeline_preparation import PreparedPipeline
from nxdpp.pipeline.stages.loss import LossTransform
from nxdpp.pipeline.step_preparation import Batch
from nxdpp.pipeline.step_runs import StepRuns
from nxdpp.tracing.input_dicts import open_inputs


@dataclass(frozen=True)
class Evaluation:
    """Result of ``eval_step`` on this rank.

    ``losses`` holds the loss of each microbatch where the model's output names a loss, and is ``None`` otherwise. Their
    mean is the loss.
    ``output`` is then the model's output, with the microbatches concatenated along dimension 0. Both are empty on
    ranks without the last stage.
    """

    losses: list[torch.Tensor] | None
    output: Any = None


class Steps:
    """Steps of this rank's part of a pipeline, each collective over the ranks of the pipeline.

    Args:
        prepared: the pipeline.
        part: parameters, buffers and modules of this rank.
        next_step: checks of modules and parameters before a step.
        upkeep: makes the part ready for a step.
        runs: runs a prepared step.
    """

    def __init__(
        self,
        prepared: PreparedPipeline,
        part: LocalPart,
        next_step: NextStep,
        upkeep: LocalUpkeep,
        runs: StepRuns,
    ) -> None:
        self.part = part
        self._normalization = prepared.normalization
        self._preparation = prepared.steps
        self._next_step = next_step
        self._upkeep = upkeep
        self._runs = runs

    def trace(self, inputs: Mapping[str, Any]) -> None:
        """Trace for ``inputs`` of a step, and verify the partition with the graph; not collective, sends nothing.

        Takes the inputs of a whole batch. A microbatch is traced, in the present training mode. Tensors on the meta
        device are allowed, and so are models without values.

        Raises:
            ValueError, TypeError: for inputs that cannot be used, and where the partition does not fit them.
            TracingError: for inputs with which the model cannot be traced.
        """
        self._preparation.check_names(inputs)
        values = open_inputs(inputs).values()
        self._upkeep.check_modules()
        device = next((value.device for value in values if isinstance(value, torch.Tensor)), self.part.device)
        batch = self._preparation.split(inputs, device)
        training = self.part.root.training
        with torch.set_grad_enabled(training):
            with_loss = self._preparation.trace(batch, training)
            self._next_step.note_hooks()
            if with_loss is not None:
                self._normalization.check(with_loss)

    def train_step(self, inputs: Mapping[str, Any], average: bool = False) -> list[torch.Tensor]:
        """Run forward and backward of all microbatches; collective over the pipeline.

        Gradients of the loss, a mean over microbatches or labels (``loss_normalization``), are added to ``.grad``. The
        average over data-parallel replicas is that of the whole batch. It is taken with ``average``, and begins during
        the last backwards. The first step compares the parameters of the replicas, and is collective over all ranks.

        Args:
            inputs: the model's inputs, equal on all ranks of the pipeline. Tensors ``(B, ...)`` are split along
                dimension 0, or by ``split_inputs_fn``; so are those in dicts among the inputs. Tensors of first
                dimension 1 beside larger ones and other values go whole to each microbatch. Images of a transformers
                model go with their rows.

        Returns:
            The detached loss of each microbatch on the rank of the last stage, an empty list on others. Their mean is
            the loss.

        Raises:
            ValueError, TypeError: for inputs that cannot be used, such as a microbatch without labels, before anything
                is sent to another stage.
            TracingError: for inputs with which the model cannot be traced.
            RuntimeError: without gradients (``torch.no_grad()``), under autocast to float16 without a ``grad_scaler``,
                for trained parameters in float16, and for a step that fails. A failure ends all ranks.
        """
        with self._runs.training("train_step", average):
            return self._runs.train(lambda: self._batch(inputs), self._preparation.training_step).losses()

    def train_samples(
        self,
        samples: Sequence[Mapping[str, Any]],
        transform: LossTransform | None = None,
        average: bool = True,
    ) -> list[Any]:
        """Run forward and backward of ``samples``, each a microbatch as it is; collective over the pipeline.

        Gradients are those of ``train_step``: of the mean of the samples' losses, or of their sum with
        ``gradient_reduction="sum"``. A loss is the first value of a tuple, unless ``output_loss_value_spec`` marks
        another.

        Args:
            samples: the model's inputs by name of each of the ``num_microbatches`` samples, equal on all ranks of the
                pipeline. Nothing is split. Inputs may be nested dicts, lists, tuples, named tuples and dataclasses. All
                samples have the same structure and dtypes; tensors may differ in sizes. The first step with each new
                mix of sizes takes longer.
            transform: a function of the number of a sample and its loss, a tensor of one element. It returns the loss
                whose gradient is taken. ``loss * 0.0`` gives zeros as gradients. The rank of the last stage calls it.
            average: as that of ``train_step``.

        Returns:
            The detached output of each sample on every rank of the pipeline, as the model returns it. Nothing is
            divided or transformed. Other ranks than the last wait for it.

        Raises:
            ValueError: with ``loss_normalization="tokens"``, whose losses depend on all samples together.
            ValueError, TypeError: for another number of samples, and as ``train_step`` does.
            TracingError, RuntimeError: as ``train_step`` does.
        """
        with self._runs.training("train_samples", average):
            run = self._runs.train(lambda: self._samples(samples), self._preparation.training_samples, transform)
            with failure_watch.reported():
                # Raises for a loss that is not-a-number for lack of labels.
                run.losses()
            return run.shared_outputs()

    def eval_step(self, inputs: Mapping[str, Any]) -> Evaluation:
        """Run the forward of all microbatches without gradients; collective over the pipeline.

        Takes and refuses ``inputs`` as ``train_step`` does.
        """
        with self._runs.evaluating("eval_step"):
            run = self._runs.evaluate(self._preparation.evaluation(self._batch(inputs)))
            if run.step.has_loss:
                return Evaluation(run.losses())
            return Evaluation(None, join_outputs(run.outputs()) if run.results else None)

    def eval_samples(self, samples: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Run the forward of ``samples`` without gradients; collective over the pipeline.

        Takes, returns and refuses as ``train_samples`` does.
        """
        with self._runs.evaluating("eval_samples"):
            step = self._preparation.evaluated_samples(self._samples(samples))
            return self._runs.evaluate(step).shared_outputs()

    def takes_number_of_items(self, microbatch: Mapping[str, Any]) -> bool:
        """Return whether the loss of ``microbatch`` depends on the ``num_items_in_batch`` in it; not collective."""
        return self._preparation.takes_number_of_items(self._microbatches([microbatch]))

    def train_microbatches(
        self,
        microbatches: Sequence[Mapping[str, Any]],
        transform: LossTransform | None = None,
        average: bool = True,
    ) -> list[torch.Tensor]:
        """Run forward and backward of ``microbatches`` as they are; collective over the pipeline.

        Gradients and losses are those of ``train_step``. The microbatches may differ in sizes, and their number from
        step to step: a number other than ``num_microbatches`` has a schedule of its own.

        Args:
            microbatches: the model's inputs by name of each, at least one, equal on all ranks of the pipeline. All have
                the same structure and dtypes, as samples have.
            transform: as that of ``train_samples``. The losses that are returned are not transformed.
            average: as that of ``train_step``.

        Returns:
            The detached loss of each microbatch on every rank of the pipeline. Their mean is the loss. Other ranks than
            the last wait for it.

        Raises:
            ValueError, TypeError, TracingError, RuntimeError: as ``train_step`` does. ``ValueError`` also for a number
                of microbatches that the schedule cannot run.
        """
        with self._runs.training("train_microbatches", average):
            prepare = self._preparation.training_microbatches
            return self._runs.train(lambda: self._microbatches(microbatches), prepare, transform).shared_losses()

    def eval_microbatches(self, microbatches: Sequence[Mapping[str, Any]], outputs: bool = False) -> list[Any]:
        """Run the forward of ``microbatches`` without gradients; collective over the pipeline.

        Takes and raises as ``train_microbatches`` does. Returns the loss of each microbatch on every rank of the
        pipeline, as the model returns it. With ``outputs`` it returns the whole output in place of that.
        """
        with self._runs.evaluating("eval_microbatches"):
            batch = self._microbatches(microbatches)
            if outputs:
                return self._runs.evaluate(self._preparation.evaluated_samples(batch)).shared_outputs()
            return self._runs.evaluate(self._preparation.evaluated_losses(batch)).shared_losses()

    def _batch(self, inputs: Mapping[str, Any]) -> Batch:
        self._preparation.check_names(inputs)
        self._upkeep.make_ready()
        inputs = readable_inputs(inputs, self.part.device)
        self._preparation.refuse_packed(inputs)
        return self._preparation.split(inputs, self.part.device)

    def _samples(self, samples: Sequence[Mapping[str, Any]]) -> Batch:
        self._preparation.check_samples(samples)
        self._upkeep.make_ready()
        return self._preparation.samples(samples, self.part.device)

    def _microbatches(self, microbatches: Sequence[Mapping[str, Any]]) -> Batch:
        if not microbatches:
            raise ValueError("a step has at least one microbatch, and was given none.")
        for microbatch in microbatches:
            self._preparation.check_names(microbatch)
        self._upkeep.make_ready()
        return self._preparation.samples(microbatches, self.part.device)

"""Training steps and evaluations of a pipeline, as a program calls them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from nxdpp.gradients.replica_gradients import ReplicaGradients
from nxdpp.pipeline.batch import Batches
from nxdpp.pipeline.prepared_step import StepPreparation
from nxdpp.pipeline.stages.loss import LossTransform
from nxdpp.pipeline.step import StepRunner
from nxdpp.ranks.faults import failure_watch
from nxdpp.ranks.faults.board import Call, board


@dataclass(frozen=True)
class Evaluation:
    """Result of ``eval_step`` on this rank.

    ``losses`` holds the loss of each microbatch where the model's output names a loss, or is one tensor of shape (). It
    is ``None`` otherwise. Their mean is the loss.
    ``output`` is then the model's output, with the microbatches joined as ``joined_outputs`` says. Both are empty on
    ranks without the last stage, unless they are wanted everywhere.
    """

    losses: list[torch.Tensor] | None
    output: Any = None


class PipelineSteps:
    """Steps of this rank's part of a pipeline, each collective over the ranks of the pipeline."""

    _batches: Batches
    _preparation: StepPreparation
    _runner: StepRunner
    _replicas: ReplicaGradients

    @property
    def is_averaged(self) -> bool:
        """``True`` if the gradients of the last training step are averaged over the replicas."""
        return self._replicas.is_averaged

    def trace(self, inputs: Mapping[str, Any]) -> None:
        """Trace for ``inputs`` of a step, and verify the partition with the graph; not collective, sends nothing.

        Takes the inputs of a whole batch. A microbatch is traced, in the present training mode. Tensors on the meta
        device are allowed, and so are models without values.

        Raises:
            ValueError, TypeError: for inputs that cannot be used, and where the partition does not fit them.
            TracingError: for inputs with which the model cannot be traced.
        """
        batch = self._batches.of_trace(inputs)
        training = self._batches.module.training
        with torch.set_grad_enabled(training):
            self._preparation.trace(batch, training)

    def train_step(self, inputs: Mapping[str, Any], average: bool = False) -> list[torch.Tensor]:
        """Run forward and backward of all microbatches; collective over the pipeline.

        Gradients of the loss, a mean over microbatches or labels (``loss_normalization``), are added to ``.grad``. With
        ``average`` they are averaged over the data-parallel replicas and are the gradients of the whole batch. This
        begins during the last backwards. The first step compares the replicas' parameters: collective over all ranks.

        Args:
            inputs: the model's inputs, equal on all ranks of the pipeline. Tensors ``(B, ...)`` are split along
                dimension 0 or ``batch_dimension``, or by ``split_inputs_fn``; so are tensors in dicts among the inputs.
                ``shared_inputs``, tensors of first dimension 1 next to larger ones, and other values go whole to each
                microbatch. Images of a transformers model go with their rows.

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
        with _call("train_step"):
            return self.train_batch(inputs, average)

    def train_batch(self, inputs: Mapping[str, Any], average: bool) -> list[torch.Tensor]:
        """Do as ``train_step``, as a part of the collective call that the program is in."""
        return self._runner.train(self._batches.of_inputs, inputs, self._preparation.with_loss, average).losses()

    def train_given(self, microbatches: Sequence[Mapping[str, Any]], average: bool) -> list[torch.Tensor]:
        """Do as ``train_step`` for ``microbatches`` as they are, as a part of the collective call of the program."""
        return self._runner.train(
            self._batches.of_microbatches, microbatches, self._preparation.with_loss, average
        ).losses()

    def train_samples(
        self,
        samples: Sequence[Mapping[str, Any]],
        transform: LossTransform | None = None,
        average: bool = True,
    ) -> list[Any]:
        """Run forward and backward of ``samples``, each a microbatch as it is; collective over the pipeline.

        Gradients are as in ``train_step``: of the mean of the samples' losses, or of their sum with
        ``gradient_reduction="sum"``. A loss is the first value of a tuple, unless ``output_loss_value_spec`` marks
        another.

        Args:
            samples: the model's inputs by name of each of the ``num_microbatches`` samples, equal on all ranks of the
                pipeline. Nothing is split. Inputs may be nested dicts, lists, tuples, named tuples and dataclasses.
                Samples may differ in sizes, dtypes and structure: each has the graph that it needs. The first step with
                each new mix takes longer.
            transform: a function of the number of a sample and its loss, a tensor of one element. It returns the loss
                whose gradient is taken. ``loss * 0.0`` gives zeros as gradients. The rank of the last stage calls it.
            average: as in ``train_step``.

        Returns:
            The detached output of each sample on every rank of the pipeline, as the model returns it. Nothing is
            divided or transformed. All ranks but the last wait for it.

        Raises:
            ValueError: with ``loss_normalization="tokens"``, whose losses depend on all samples together.
            ValueError, TypeError: for a wrong number of samples, and as ``train_step`` does.
            TracingError, RuntimeError: as ``train_step`` does.
        """
        with _call("train_samples"):
            prepare = partial(self._preparation.with_loss_and_output, transform=transform)
            result = self._runner.train(self._batches.of_samples, samples, prepare, average)
            with failure_watch.reported():
                # Raises for a loss that is not-a-number for lack of labels.
                result.losses()
            return result.shared_outputs()

    def eval_step(self, inputs: Mapping[str, Any], everywhere: bool = False) -> Evaluation:
        """Run the forward of all microbatches without gradients; collective over the pipeline.

        Takes and refuses ``inputs`` as ``train_step`` does, but any number of rows: some microbatches then have a row
        more than others, and weigh as much more in a mean. With ``everywhere`` all ranks of the pipeline get the
        losses or the output, each a copy.
        """
        with _call("eval_step"):
            return self.evaluate_batch(inputs, everywhere)

    def evaluate_batch(self, inputs: Mapping[str, Any], everywhere: bool = False) -> Evaluation:
        """Do as ``eval_step``, as a part of the collective call that the program is in."""
        runner, prepare = self._runner, self._preparation.with_named_loss
        result = runner.evaluate(self._batches.of_evaluation, inputs, prepare, everywhere)
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

    def eval_samples(self, samples: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Run the forward of ``samples`` without gradients; collective over the pipeline.

        Takes, returns and refuses as ``train_samples`` does.
        """
        with _call("eval_samples"):
            prepare = self._preparation.with_output
            return self._runner.evaluate(self._batches.of_samples, samples, prepare).shared_outputs()

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

        Gradients and losses are as in ``train_step``. The microbatches may differ as samples do, and their number from
        step to step: a number other than ``num_microbatches`` has a schedule of its own.

        Args:
            microbatches: the model's inputs by name of each, at least one, equal on all ranks of the pipeline.
            transform: as in ``train_samples``. The returned losses are not transformed.
            average: as in ``train_step``.
            outputs: return the whole output of each in place of its loss, as ``eval_microbatches`` does.

        Returns:
            The detached loss of each microbatch on every rank of the pipeline. Their mean is the loss. All ranks but
            the last wait for it.

        Raises:
            ValueError, TypeError, TracingError, RuntimeError: as ``train_step`` does. ``ValueError`` also for a number
                of microbatches that the schedule cannot run.
        """
        with _call("train_microbatches"):
            prepared = self._preparation.with_loss_and_output if outputs else self._preparation.with_loss
            prepare = partial(prepared, transform=transform)
            result = self._runner.train(self._batches.of_microbatches, microbatches, prepare, average)
            return result.shared_outputs() if outputs else result.shared_losses()

    def eval_microbatches(self, microbatches: Sequence[Mapping[str, Any]], outputs: bool = False) -> list[Any]:
        """Run the forward of ``microbatches`` without gradients; collective over the pipeline.

        Takes and raises as ``train_microbatches`` does. Returns the loss of each microbatch on every rank of the
        pipeline, as the model returns it. With ``outputs`` it returns the whole output in place of that.
        """
        with _call("eval_microbatches"):
            prepare = self._preparation.with_output if outputs else self._preparation.with_losses
            result = self._runner.evaluate(self._batches.of_microbatches, microbatches, prepare)
            return result.shared_outputs() if outputs else result.shared_losses()


def _call(name: str) -> Call:
    return board.call(name, "step", "pipeline", has_limit=True)

"""Training steps and evaluations of a pipeline.

::

    inputs or samples ─ StepPreparation ─▶ PreparedStep ─ StepRunner ─▶ losses, or outputs on all ranks
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from nxdpp.parallel_layers import background_errors, failure_watch, parallel_state
from nxdpp.parallel_layers.faults.board import board
from nxdpp.parallel_layers.sequence_parallel import StepGradients
from nxdpp.pipeline import arguments
from nxdpp.pipeline.config import PipelineConfig
from nxdpp.pipeline.local.next_step import NextStep
from nxdpp.pipeline.local.part import LocalPart
from nxdpp.pipeline.microbatches.rows import join_outputs, readable_inputs
from nxdpp.pipeline.outputs.shared_outputs import shared_outputs
from nxdpp.pipeline.partition.partition import Partition
from nxdpp.pipeline.reference_step import ReferenceStep
from nxdpp.pipeline.replicas.gradients import ReplicaGradients
from nxdpp.pipeline.replicas.tensor_copies import TensorCopies
from nxdpp.pipeline.runtime.step_runner import StepRunner
from nxdpp.pipeline.stages.cut_graph import fill_output
from nxdpp.pipeline.stages.loss import LossGradient, LossTransform
from nxdpp.pipeline.step_preparation import Batch, PreparedStep, StepPreparation


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
    """Training steps and evaluations of one pipeline, each collective over its ranks.

    ``Pipeline`` describes the inputs, results and errors of each step.

    Args:
        config: settings of the pipeline.
        partition: the stages.
        last_rank: rank of the last stage.
        part: parameters, buffers and modules of this rank.
        replicas: the average of gradients.
        next_step: checks of modules and parameters between steps.
        preparation: makes a ``PreparedStep`` of a batch.
        runner: runs it.
        loss_gradient: gradient that the backward of a loss begins with.
        make_ready: follows replaced modules, and raises for modules or tensors that no step can use.
    """

    def __init__(
        self,
        config: PipelineConfig,
        partition: Partition,
        last_rank: int,
        part: LocalPart,
        replicas: ReplicaGradients,
        next_step: NextStep,
        preparation: StepPreparation,
        runner: StepRunner,
        loss_gradient: LossGradient,
        make_ready: Callable[[], None],
    ) -> None:
        self._config = config
        self._partition = partition
        self._last_rank = last_rank
        self._part = part
        self._replicas = replicas
        self._next_step = next_step
        self._preparation = preparation
        self._runner = runner
        self._loss_gradient = loss_gradient
        self._make_ready = make_ready
        self._copies = TensorCopies(part.module)
        self._sequence = StepGradients(part.module)
        self._check_first = config.check_against_module is not None

    @property
    def device(self) -> torch.device:
        """The device of this rank's stages."""
        parameter = next(self._part.module.parameters(), None)
        return parallel_state.local_device() if parameter is None else parameter.device

    def verify_again(self) -> None:
        """Compare the copies of tensor-parallel ranks in the next step."""
        self._copies.verify_again()

    def train(self, inputs: Mapping[str, Any], average: bool) -> list[torch.Tensor]:
        """Run ``Pipeline.train_step``."""
        with self._training("train_step", average):
            step, results = self._train(lambda: self._batch(inputs), self._preparation.training_step)
            return step.loss.scaled([result[0] for result in results if result])

    def train_samples(
        self, samples: Sequence[Mapping[str, Any]], transform: LossTransform | None, average: bool
    ) -> list[Any]:
        """Run ``Pipeline.train_samples``."""
        with self._training("train_samples", average):
            prepare = self._preparation.training_samples
            step, results = self._train(lambda: self._samples(samples), prepare, transform)
            with failure_watch.reported():
                # Raises for a loss that is not-a-number for lack of labels.
                step.loss.scaled([result[0] for result in results if result])
                return self._shared_outputs(step, results)

    def takes_number_of_items(self, microbatch: Mapping[str, Any]) -> bool:
        """Run ``Pipeline.takes_number_of_items``."""
        return self._preparation.takes_number_of_items(self._microbatches([microbatch]))

    def train_microbatches(
        self, microbatches: Sequence[Mapping[str, Any]], transform: LossTransform | None, average: bool
    ) -> list[torch.Tensor]:
        """Run ``Pipeline.train_microbatches``."""
        with self._training("train_microbatches", average):
            step, results = self._train(
                lambda: self._microbatches(microbatches), self._preparation.training_microbatches, transform
            )
            return self._shared_losses(step, results)

    def evaluate_microbatches(self, microbatches: Sequence[Mapping[str, Any]], outputs: bool) -> list[Any]:
        """Run ``Pipeline.eval_microbatches``."""
        with self._evaluating("eval_microbatches"):
            batch = self._microbatches(microbatches)
            prepare = self._preparation
            step = prepare.evaluated_samples(batch) if outputs else prepare.evaluated_losses(batch)
            results = self._run(step, train=False)
            if not outputs:
                return self._shared_losses(step, results)
            with failure_watch.reported():
                return self._shared_outputs(step, results)

    def evaluate(self, inputs: Mapping[str, Any]) -> Evaluation:
        """Run ``Pipeline.eval_step``."""
        with self._evaluating("eval_step"):
            step = self._preparation.evaluation(self._batch(inputs))
            results = self._run(step, train=False)
            if step.has_loss:
                return Evaluation(step.loss.scaled([result[0] for result in results if result]))
            return Evaluation(None, join_outputs(_outputs(step, results)) if results else None)

    def evaluate_samples(self, samples: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Run ``Pipeline.eval_samples``."""
        with self._evaluating("eval_samples"):
            step = self._preparation.evaluated_samples(self._samples(samples))
            results = self._run(step, train=False)
            with failure_watch.reported():
                return self._shared_outputs(step, results)

    @contextmanager
    def _training(self, name: str, average: bool) -> Iterator[None]:
        parallel_state.refuse_in_debug("a training step")
        background_errors.begin_step()
        call = board.call(name, "step", "pipeline", has_limit=True)
        with call, self._runner.step(), self._replicas.step(average):
            yield

    @contextmanager
    def _evaluating(self, name: str) -> Iterator[None]:
        """No gradients, also in the caller's inference mode, whose tensors no training step could use later."""
        parallel_state.refuse_in_debug("an evaluation")
        call = board.call(name, "step", "pipeline", has_limit=True)
        with call, self._runner.step(), torch.inference_mode(mode=False), torch.no_grad():
            yield

    def _train(
        self,
        take: Callable[[], Batch],
        prepare: Callable[[Batch], PreparedStep],
        transform: LossTransform | None = None,
    ) -> tuple[PreparedStep, list[list[Any]]]:
        """Run the training step that ``prepare`` makes of the batch; return it with the results of each microbatch."""
        if not torch.is_grad_enabled():
            raise RuntimeError("training needs gradients, and they are off (torch.no_grad()): evaluate there.")
        batch = take()
        scaler = self._config.grad_scaler
        arguments.check_autocast(self.device, is_scaled=scaler is not None and scaler.is_enabled())
        self._next_step.check_dtypes()
        if scaler is not None:
            scaler.begin_step(self.device)
        step = prepare(batch)
        self._next_step.note_hooks()
        check = self._first_check()

        def once_verified() -> None:
            self._copies.verify(self._part.seed)
            self._replicas.verify(self._part.attribute_lines())
            if check is not None:
                check.run(step.loss.microbatches, step.scales, transform)

        self._part.tied.set_aside()
        self._sequence.set_aside()
        results = self._run(step, train=True, once_verified=once_verified, transform=transform)
        with failure_watch.reported():
            self._sequence.add_up()
            self._part.tied.add_up(self._runner.transport(self.device))
        if check is not None:
            plans = step.cut.plans([step.cut.loss_of_sample(self._config.output_loss_value_spec)])
            check.compare([result[0] for result in results if result], plans)
            self._check_first = False
        with failure_watch.reported():
            self._replicas.finish()
        return step, results

    def _run(
        self,
        step: PreparedStep,
        train: bool,
        once_verified: Callable[[], None] | None = None,
        transform: LossTransform | None = None,
    ) -> list[list[Any]]:
        """Run ``step`` as ``StepRunner.run`` does."""
        results = self._runner.run(
            step.program,
            step.loss.microbatches,
            step.given,
            self.device,
            train=train,
            origin=self._part.origin,
            once_verified=once_verified,
            scales=step.scales if train else None,
            values=self._next_step.unverified_values(),
            average=self._replicas if train else None,
            transform=transform,
            may_differ=step.may_differ,
        )
        self._next_step.note_verified()
        return results

    def _shared_outputs(self, step: PreparedStep, results: list[list[Any]]) -> list[Any]:
        group = parallel_state.get_pipeline_control_group()
        return _outputs(step, shared_outputs(results, self._last_rank, group, self.device))

    def _shared_losses(self, step: PreparedStep, results: list[list[Any]]) -> list[torch.Tensor]:
        """Return the losses of the microbatches on all ranks; collective over the pipeline."""
        group = parallel_state.get_pipeline_control_group()
        with failure_watch.reported():
            own = step.loss.scaled([result[0] for result in results if result])
            losses: list[torch.Tensor] = shared_outputs(own, self._last_rank, group, self.device)
            return losses

    def _first_check(self) -> ReferenceStep | None:
        if not self._check_first:
            return None
        group = parallel_state.get_pipeline_control_group()
        spec, function = self._config.output_loss_value_spec, self._config.loss_function
        return ReferenceStep(
            self._part, self._partition.owners, group, spec, self.device, self._loss_gradient, function
        )

    def _batch(self, inputs: Mapping[str, Any]) -> Batch:
        self._preparation.check_names(inputs)
        self._make_ready()
        inputs = readable_inputs(inputs, self.device)
        self._preparation.refuse_packed(inputs)
        return self._preparation.split(inputs, self.device)

    def _samples(self, samples: Sequence[Mapping[str, Any]]) -> Batch:
        self._preparation.check_samples(samples)
        self._make_ready()
        return self._preparation.samples(samples, self.device)

    def _microbatches(self, microbatches: Sequence[Mapping[str, Any]]) -> Batch:
        if not microbatches:
            raise ValueError("a step has at least one microbatch, and was given none.")
        for microbatch in microbatches:
            self._preparation.check_names(microbatch)
        self._make_ready()
        return self._preparation.samples(microbatches, self.device)


def _outputs(step: PreparedStep, results: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the model's output of each microbatch, from the values that the program ends with."""
    named = [dict(zip(step.program.results, values, strict=True)) for values in results]
    return [fill_output(step.cut.output, values) for values in named]

"""Runs of prepared steps on one rank, with all that a training step does beside its actions.

::

    training step    verify copies and replicas ─▶ actions of the stages ─▶ tied weights, reference, average ─▶ StepRun
    evaluation                                     actions of the stages ─────────────────────────────────────▶ StepRun
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from nxdpp.parallel_layers import background_errors, failure_watch, parallel_state
from nxdpp.parallel_layers.faults.board import board
from nxdpp.parallel_layers.sequence_parallel import StepGradients
from nxdpp.pipeline import arguments
from nxdpp.pipeline.local.next_step import NextStep
from nxdpp.pipeline.local.part import LocalPart
from nxdpp.pipeline.outputs.shared_outputs import shared_outputs
from nxdpp.pipeline.pipeline_preparation import PreparedPipeline
from nxdpp.pipeline.reference_step import ReferenceStep
from nxdpp.pipeline.replicas.gradients import ReplicaGradients
from nxdpp.pipeline.replicas.tensor_copies import TensorCopies
from nxdpp.pipeline.stages.cut_graph import fill_output
from nxdpp.pipeline.stages.loss import LossTransform
from nxdpp.pipeline.step_preparation import Batch, PreparedStep


@dataclass(frozen=True)
class StepRun:
    """A step that this rank has run.

    Attributes:
        step: the prepared step.
        results: for each microbatch the values that the program ends with; empty on ranks without the last stage.
        last_rank: rank of the last stage.
        device: the device of this rank's stages.
    """

    step: PreparedStep
    results: list[list[Any]]
    last_rank: int
    device: torch.device

    def losses(self) -> list[torch.Tensor]:
        """Return the loss of each microbatch. Raises ``ValueError`` for one without labels."""
        return self.step.loss.scaled([values[0] for values in self.results if values])

    def outputs(self) -> list[Any]:
        """Return the model's output of each microbatch."""
        return self._filled(self.results)

    def shared_losses(self) -> list[torch.Tensor]:
        """Return the losses on all ranks; collective over the pipeline."""
        with failure_watch.reported():
            losses: list[torch.Tensor] = self._shared(self.losses())
            return losses

    def shared_outputs(self) -> list[Any]:
        """Return the outputs on all ranks; collective over the pipeline."""
        with failure_watch.reported():
            return self._filled(self._shared(self.results))

    def _shared(self, own: Any) -> Any:
        return shared_outputs(own, self.last_rank, parallel_state.get_pipeline_control_group(), self.device)

    def _filled(self, results: list[list[Any]]) -> list[Any]:
        named = [dict(zip(self.step.program.results, values, strict=True)) for values in results]
        return [fill_output(self.step.cut.output, values) for values in named]


class StepRuns:
    """Runs of the steps of one pipeline, each collective over its ranks.

    Args:
        prepared: the pipeline.
        part: parameters, buffers and modules of this rank.
        next_step: checks of modules and parameters before a step.
        replicas: the average of gradients.
        copies: parameters that each tensor-parallel rank has a copy of.
    """

    def __init__(
        self,
        prepared: PreparedPipeline,
        part: LocalPart,
        next_step: NextStep,
        replicas: ReplicaGradients,
        copies: TensorCopies,
    ) -> None:
        self._prepared = prepared
        self._runner = prepared.runner
        self._part = part
        self._next_step = next_step
        self._replicas = replicas
        self._copies = copies
        self._sequence = StepGradients(part.module)
        self._check_first = prepared.config.check_against_module is not None

    @contextmanager
    def training(self, name: str, average: bool) -> Iterator[None]:
        """Make the block the training step of the call ``name``; ``average`` as ``ReplicaGradients.step`` takes it."""
        parallel_state.refuse_in_debug("a training step")
        background_errors.begin_step()
        call = board.call(name, "step", "pipeline", has_limit=True)
        with call, self._runner.step(), self._replicas.step(average):
            yield

    @contextmanager
    def evaluating(self, name: str) -> Iterator[None]:
        """Make the block the evaluation of the call ``name``.

        It has no gradients, also in the caller's inference mode, whose tensors no training step could use later.
        """
        parallel_state.refuse_in_debug("an evaluation")
        call = board.call(name, "step", "pipeline", has_limit=True)
        with call, self._runner.step(), torch.inference_mode(mode=False), torch.no_grad():
            yield

    def train(
        self,
        take: Callable[[], Batch],
        prepare: Callable[[Batch], PreparedStep],
        transform: LossTransform | None = None,
    ) -> StepRun:
        """Run the training step that ``prepare`` makes of the batch, which ``take`` gives; within ``training``.

        ``transform`` as ``Pipeline.train_samples`` takes it. Raises as ``Pipeline.train_step`` does.
        """
        # Prepare.
        if not torch.is_grad_enabled():
            raise RuntimeError("training needs gradients, and they are off (torch.no_grad()): evaluate there.")
        batch = take()
        config = self._prepared.config
        scaler = config.grad_scaler
        arguments.check_autocast(self._part.device, is_scaled=scaler is not None and scaler.is_enabled())
        self._next_step.check_dtypes()
        if scaler is not None:
            scaler.begin_step(self._part.device)
        step = prepare(batch)
        self._next_step.note_hooks()
        reference = self._reference()

        def once_verified() -> None:
            self._copies.verify(self._part.seed)
            self._replicas.verify(self._part.attribute_lines())
            if reference is not None:
                reference.run(step.loss.microbatches, step.scales, transform)

        # Run.
        self._part.tied.set_aside()
        self._sequence.set_aside()
        run = self._run(step, train=True, once_verified=once_verified, transform=transform)
        # Add up the gradients of several ranks, compare with the reference, and average over the replicas.
        with failure_watch.reported():
            self._sequence.add_up()
            self._part.tied.add_up(self._runner.transport(self._part.device))
        if reference is not None:
            plans = step.cut.plans([step.cut.loss_of_sample(config.output_loss_value_spec)])
            reference.compare([values[0] for values in run.results if values], plans)
            self._check_first = False
        with failure_watch.reported():
            self._replicas.finish()
        return run

    def evaluate(self, step: PreparedStep) -> StepRun:
        """Run the evaluation ``step``; within ``evaluating``."""
        return self._run(step, train=False)

    def _run(
        self,
        step: PreparedStep,
        train: bool,
        once_verified: Callable[[], None] | None = None,
        transform: LossTransform | None = None,
    ) -> StepRun:
        results = self._runner.run(
            step.program,
            step.loss.microbatches,
            step.given,
            self._part.device,
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
        return StepRun(step, results, self._prepared.last_rank, self._part.device)

    def _reference(self) -> ReferenceStep | None:
        """The step of the unwrapped module, in the first training step with ``check_against_module``."""
        if not self._check_first:
            return None
        config = self._prepared.config
        return ReferenceStep(
            self._part,
            self._prepared.partition.owners,
            parallel_state.get_pipeline_control_group(),
            config.output_loss_value_spec,
            self._part.device,
            self._prepared.loss_gradient,
            config.loss_function,
        )

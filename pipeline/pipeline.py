"""Pipeline: a module cut into stages, of which this rank holds and runs its own.

::

    module ─ trace ─▶ graph ─ make_partition ─▶ Partition ─┬─▶ ProgramCache   a program for each spec of inputs
                                                           ├─▶ LocalPart      this rank's parameters; others are freed
                                                           └─▶ StepRunner     engine, channels, timeline
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from nxdpp.parallel_layers import clip_grad_norm, failure_watch, parallel_state
from nxdpp.parallel_layers.faults.board import board
from nxdpp.parallel_layers.overlapped_average import AverageReport
from nxdpp.pipeline.config import PipelineConfig
from nxdpp.pipeline.local.local_module import stage_module
from nxdpp.pipeline.local.next_step import NextStep
from nxdpp.pipeline.local.part import LocalPart
from nxdpp.pipeline.local.upkeep import LocalUpkeep
from nxdpp.pipeline.loss.mean_loss import mean_loss
from nxdpp.pipeline.pipeline_preparation import prepare_pipeline
from nxdpp.pipeline.replicas.gradients import ReplicaGradients
from nxdpp.pipeline.replicas.tensor_copies import TensorCopies
from nxdpp.pipeline.step_runs import StepRuns
from nxdpp.pipeline.steps import Steps


class Pipeline(Steps):
    """A module cut into stages, of which this rank holds and runs its own.

    Every rank constructs it with the same module and configuration, after
    ``parallel_state.initialize_model_parallel``. Construction is collective only for ``partition="profiled"``. It frees
    the parameters of other stages in ``module`` itself.

    Args:
        module: the model, with the same weights on every rank.
        config: settings, equal on every rank.
        agreed: other settings that must be equal on every rank, by name. A step verifies them.

    Attributes:
        partition: the stage of each layer and parameter.
        layer_classes: classes of the transformer layers.
        cut_modules: names of modules that are no layers and that a cut follows.
        schedule: the schedule with its placement of stages on ranks.
        rank: this rank of the pipeline.
        part: the parameters, buffers and modules that this rank holds.
        original_module, local_module: the whole model, and this rank's modules under their original names.
        tied_names: the names, in the whole model, of each parameter and each buffer that has several.

    Raises:
        ValueError, TypeError: for a setting that cannot be honoured, before anything is changed.
        TracingError: for a model that cannot be traced.
        RuntimeError: before ``initialize_model_parallel``.
    """

    def __init__(self, module: nn.Module, config: PipelineConfig, agreed: Mapping[str, Any] | None = None) -> None:
        self.rank = parallel_state.get_pipeline_model_parallel_rank()
        if not isinstance(config, PipelineConfig):
            raise TypeError(f"the configuration must be a PipelineConfig, not {config!r:.80}: PipelineConfig(...).")
        if isinstance(module, Pipeline):
            raise TypeError("the model is a Pipeline already. Use it as it is (train_step), or build the model again.")
        prepared = prepare_pipeline(module, config, self.rank, agreed or {})
        # From here on the parameters of other stages are freed.
        self.original_module = module
        self.config = config
        self.schedule = prepared.schedule
        self.layer_classes = prepared.options.layer_classes
        self.cut_modules = prepared.options.cut_modules
        self.partition = prepared.partition
        part = LocalPart(
            module,
            self.partition.owners_by_rank(self.schedule.placement.rank_of),
            self.rank,
            self.partition.layers,
            torch.initial_seed(),
            config.param_init_fn,
        )
        self.local_module: nn.Module = part.module
        self.tied_names = part.aliases
        self._last_rank = prepared.last_rank
        self._exchanges = prepared.exchanges
        self._programs = prepared.programs
        self._runner = prepared.runner
        self._replicas = ReplicaGradients(part, prepared.exchanges, config.gradient_reduction == "mean")
        self._copies = TensorCopies(part.module)
        next_step = NextStep(module, part, self.partition.layers)
        upkeep = LocalUpkeep(
            part, self.partition.layers, next_step, self._programs.replace, self._forget, self._verify_again
        )
        runs = StepRuns(prepared, part, next_step, self._replicas, self._copies)
        super().__init__(prepared, part, next_step, upkeep, runs)
        if part.is_initialised_at_once:
            self.materialise()
        board.pipelines = prepared.number

    @property
    def local_stages(self) -> list[int]:
        """This rank's stages, in the order of the model."""
        return self.schedule.placement.stages_of(self.rank)

    @property
    def local_stage_modules(self) -> list[nn.Module]:
        """The modules of each of this rank's stages, under their original names, in the order of the model."""
        if len(self.local_stages) == 1:
            return [self.local_module]
        owners = self.partition.owners
        stages = [set(self.partition.parameters_of(stage)) for stage in self.local_stages]
        return [stage_module(self.local_module, names, owners) for names in stages]

    @property
    def holds_last_stage(self) -> bool:
        """``True`` if this rank holds the last stage, and so the loss."""
        return self.partition.stages - 1 in self.local_stages

    @property
    def device(self) -> torch.device:
        """The device of this rank's stages."""
        return self.part.device

    @property
    def is_averaged(self) -> bool:
        """``True`` if the gradients of the last training step are averaged over the replicas."""
        return self._replicas.is_averaged

    @property
    def average_report(self) -> AverageReport:
        """Figures of the last average of gradients that began during a step."""
        return self._replicas.report

    @property
    def busy_share(self) -> float:
        """Share of the last step, between 0 and 1, in which this rank computed."""
        return self._runner.busy_share

    @property
    def step_seconds(self) -> float:
        """Seconds of the last step on the device, without the average over replicas."""
        return self._runner.seconds

    @property
    def action_seconds(self) -> dict[str, float]:
        """Seconds of each compute action of this rank in the last step, by its text; empty on XLA."""
        return self._runner.action_seconds

    @property
    def sent_bytes(self) -> int:
        """Bytes of the tensors that this rank has sent to other ranks of the pipeline in the last step."""
        return self._runner.sent_bytes

    @property
    def compile_seconds(self) -> float:
        """Seconds in which this process compiled graphs, from the end of the step before to the end of the last."""
        return self._runner.compile_seconds

    def mean_loss(self, losses: Sequence[torch.Tensor], train: bool = True) -> torch.Tensor:
        """Return the mean loss of all microbatches and replicas, float32, on every rank; collective over all ranks.

        ``losses`` are the result of a step on this rank, a training step or an evaluation.
        """
        with board.call("mean_loss"), failure_watch.reported():
            if self.holds_last_stage:
                self._exchanges.begin(f"mean loss of {'a training step' if train else 'an evaluation'}")
            return mean_loss(losses, self._last_rank, self.device)

    def average_gradients(self) -> None:
        """Average ``.grad`` over the data-parallel replicas; collective over them.

        Raises ``RuntimeError`` for replicas with other parameters than the first.
        """
        with board.call("average_gradients"), failure_watch.reported():
            self._replicas.verify()
            self._replicas.average()

    def no_sync(self) -> AbstractContextManager[None]:
        """Leave the average over data-parallel replicas out of the training steps of the block.

        Gradients add up on each replica. The next step outside of the block, or ``average_gradients``, averages their
        sum. Not collective; every rank must enter it for the same steps. The sums of tied weights over stages are
        taken in each step.
        """
        return self._replicas.no_sync()

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients of the whole model so that their norm is ``max_norm`` at most; return the norm before.

        Collective over all ranks, after the average over replicas. Takes, returns and raises as
        ``parallel_layers.clip_grad_norm`` does. Raises ``RuntimeError`` for gradients that ``grad_scaler`` has scaled,
        or that are not averaged.
        """
        self._replicas.check_averaged()
        if self.config.grad_scaler is not None:
            self.config.grad_scaler.check_unscaled()
        return clip_grad_norm(self.local_module.parameters(), max_norm, norm_type)

    def materialise(self) -> None:
        """Give initial weights to this rank's tensors on the meta device; not collective.

        Raises ``RuntimeError`` for a tensor that nothing initialises, before anything is changed.
        """
        self._upkeep.materialise()

    def move_model_to_device(self, device: torch.device | str | int | None = None) -> None:
        """Materialise this rank's part and move it to ``device``, by default the rank's own; collective over all ranks.

        Copies of a tied weight get the values of its first owner. Raises as ``NxDPPModel.move_model_to_device`` does.
        """
        target = self._upkeep.check_device(device)
        failure_watch.refuse_after_failure()
        with board.call("move_model_to_device"):
            self._upkeep.move_to(target, self._runner.transport)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool, assign: bool) -> Any:
        """Load this rank's part of a state dict; not collective. The replicas compare values at their next average."""
        return self._upkeep.load(state_dict, strict, assign)

    def initial_weights_of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """CPU tensors with the weights that ``materialise`` would give to ``tensors`` of this rank; not collective.

        The model stays as it is. Raises ``RuntimeError`` for tensors that nothing initialises.
        """
        return self.part.initial_weights_of(tensors)

    def replace_local_tensors(self, replaced: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Replace the first parameter or buffer of each pair by the second, at the end of a load; not collective."""
        self._upkeep.replace(replaced)

    def refresh(self) -> None:
        """Trace and exchange metadata anew; every rank calls it after ``requires_grad`` or modules changed."""
        self._upkeep.refresh()

    def follow(self) -> None:
        """Follow tensors and modules that were moved, loaded or replaced."""
        self._upkeep.follow()

    def check_materialised(self) -> None:
        """Raise ``RuntimeError`` while tensors of this rank are on the meta device."""
        self.part.check_materialised()

    def _forget(self) -> None:
        """Forget what was made of this rank's part before a change."""
        self._replicas.follow()
        self._programs.forget()
        self._runner.forget_engines()

    def _verify_again(self) -> None:
        """Have the ranks compare the parameters again."""
        self._replicas.verify_again()
        self._copies.verify_again()

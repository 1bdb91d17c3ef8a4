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

from nxdpp.parallel_layers import (
    clip_grad_norm,
    failure_watch,
    move_model_to_device,
    parallel_state,
)
from nxdpp.parallel_layers.faults.board import board
from nxdpp.parallel_layers.overlapped_average import AverageReport
from nxdpp.pipeline import arguments
from nxdpp.pipeline.config import PipelineConfig
from nxdpp.pipeline.first_partition import first_partition
from nxdpp.pipeline.local.grouped_experts import refuse_grouped_experts
from nxdpp.pipeline.local.local_module import stage_module
from nxdpp.pipeline.local.lost_ties import refuse_lost_ties
from nxdpp.pipeline.local.next_step import NextStep
from nxdpp.pipeline.local.other_wrappers import refuse_other_wrappers
from nxdpp.pipeline.local.part import LocalPart
from nxdpp.pipeline.local.spine_hooks import warn_of_traced_hooks
from nxdpp.pipeline.local.upkeep import LocalUpkeep
from nxdpp.pipeline.loss.mean_loss import mean_loss
from nxdpp.pipeline.loss.normalization import LossNormalization
from nxdpp.pipeline.replicas.exchange import ReplicaExchanges
from nxdpp.pipeline.replicas.gradients import ReplicaGradients
from nxdpp.pipeline.runtime.step_runner import StepRunner
from nxdpp.pipeline.stages.loss import LossTransform
from nxdpp.pipeline.stages.program_cache import ProgramCache
from nxdpp.pipeline.step_preparation import StepPreparation
from nxdpp.pipeline.steps import Evaluation, Steps
from nxdpp.schedules.timeline_file import check_path
from nxdpp.tracing.input_dicts import open_inputs


class Pipeline:
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
        config.check(module)
        refuse_other_wrappers(module)
        refuse_grouped_experts(module, parallel_state.local_device())
        refuse_lost_ties(module)
        self.original_module = module
        self.config = config
        self.schedule = config.choose_schedule(parallel_state.get_pipeline_model_parallel_size())
        options = config.tracing_options(module)
        self.layer_classes = options.layer_classes
        self.cut_modules = options.cut_modules
        self.partition = first_partition(
            module,
            options,
            self.schedule.placement.stages,
            config.partition_policy(module, self.schedule),
            None if config.input_names is None else config.of_module(module, config.input_names),
            config.partition_batch,
        )
        self._number = board.pipelines + 1
        common = {
            **(agreed or {}),
            "number of the wrapped model": self._number,
            "loss_normalization": config.loss_normalization,
            "count_items_fn": config.count_items_fn is not None,
            "gradient_reduction": config.gradient_reduction,
            "grad_scaler": None if config.grad_scaler is None else config.grad_scaler.settings(),
        }
        of_replicas = {
            "num_microbatches": config.num_microbatches,
            "output_loss_value_spec": config.output_loss_value_spec,
            "loss_fn": config.loss_fn,
            "grad_scaler": config.grad_scaler is not None,
        }
        self._exchanges = ReplicaExchanges({**common, **of_replicas})
        self._normalization = LossNormalization(
            module,
            config.loss_normalization,
            config.count_items_fn,
            config.output_loss_value_spec,
            self._exchanges,
        )
        self._normalization.check_example(self.partition, options, config.input_names, config.partition_batch)
        warn_of_traced_hooks(module, self.partition.layers)
        arguments.warn_of_own_listings(module)
        timeline_path = None if config.trace_file_path is None else check_path(config.trace_file_path)
        settings = {
            "schedule": self.schedule.name,
            "stages": self.partition.stages,
            "pipeline_cuts": list(self.partition.cuts),
            "num_microbatches": config.num_microbatches,
            **common,
            "writes a timeline": timeline_path is not None,
            "check_against_module": config.check_against_module,
            "check_inputs": config.check_inputs,
        }
        self._programs = ProgramCache(
            self.partition, options, config.output_loss_value_spec, self.local_stages, settings
        )
        self._loss_gradient = torch.ones_like if config.grad_scaler is None else config.grad_scaler.loss_gradient
        self._runner = StepRunner(
            self.schedule,
            self.rank,
            not config.deallocate_pipeline_outputs,
            config.check_inputs,
            timeline_path,
            self._loss_gradient,
        )
        self._preparation = StepPreparation(module, config, self._programs, self._normalization)
        # From here on the parameters of other stages are freed.
        self.part = LocalPart(
            module,
            self.partition.owners_by_rank(self.schedule.placement.rank_of),
            self.rank,
            self.partition.layers,
            torch.initial_seed(),
            config.param_init_fn,
        )
        self.local_module: nn.Module = self.part.module
        self._replicas = ReplicaGradients(self.part, self._exchanges, config.gradient_reduction == "mean")
        self.tied_names = self.part.aliases
        self._next_step = NextStep(module, self.part, self.partition.layers)
        self._upkeep = LocalUpkeep(self.part, self._programs.replace)
        self._steps = Steps(
            config,
            self.partition,
            self._last_rank,
            self.part,
            self._replicas,
            self._next_step,
            self._preparation,
            self._runner,
            self._loss_gradient,
            self._make_ready,
        )
        if self.part.is_initialised_at_once:
            self.materialise()
        board.pipelines = self._number

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
        return self._steps.device

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
        self._check_modules()
        device = next((value.device for value in values if isinstance(value, torch.Tensor)), self.device)
        batch = self._preparation.split(inputs, device)
        training = self.original_module.training
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
        return self._steps.train(inputs, average)

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
            The detached output of each sample on every rank of the pipeline, as the model returns it: nothing is
            divided or transformed. Other ranks than the last wait for it.

        Raises:
            ValueError: with ``loss_normalization="tokens"``, whose losses depend on all samples together.
            ValueError, TypeError: for another number of samples, and as ``train_step`` does.
            TracingError, RuntimeError: as ``train_step`` does.
        """
        return self._steps.train_samples(samples, transform, average)

    def eval_step(self, inputs: Mapping[str, Any]) -> Evaluation:
        """Run the forward of all microbatches without gradients; collective over the pipeline.

        Takes and refuses ``inputs`` as ``train_step`` does.
        """
        return self._steps.evaluate(inputs)

    def eval_samples(self, samples: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Run the forward of ``samples`` without gradients; collective over the pipeline.

        Takes, returns and refuses as ``train_samples`` does.
        """
        return self._steps.evaluate_samples(samples)

    def takes_number_of_items(self, microbatch: Mapping[str, Any]) -> bool:
        """Return whether the loss of ``microbatch`` depends on the ``num_items_in_batch`` in it; not collective."""
        return self._steps.takes_number_of_items(microbatch)

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
        return self._steps.train_microbatches(microbatches, transform, average)

    def eval_microbatches(self, microbatches: Sequence[Mapping[str, Any]], outputs: bool = False) -> list[Any]:
        """Run the forward of ``microbatches`` without gradients; collective over the pipeline.

        Takes and raises as ``train_microbatches`` does. Returns the loss of each microbatch on every rank of the
        pipeline, as the model returns it. With ``outputs`` it returns the whole output in place of that.
        """
        return self._steps.evaluate_microbatches(microbatches, outputs)

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
        if self.part.materialise():
            self.follow()

    def move_model_to_device(self, device: torch.device | str | int | None = None) -> None:
        """Materialise this rank's part and move it to ``device``, by default the rank's own; collective over all ranks.

        Copies of a tied weight get the values of its first owner. Raises as ``NxDPPModel.move_model_to_device`` does.
        """
        target = self._upkeep.check_device(device)
        failure_watch.refuse_after_failure()
        with board.call("move_model_to_device"):
            self.materialise()
            move_model_to_device(self.local_module, target)
            self.follow()
            self._upkeep.make_equal(self._runner.transport, self.device)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool, assign: bool) -> Any:
        """Load this rank's part of a state dict; not collective. The replicas compare values at their next average."""
        result = self._upkeep.load(state_dict, strict, assign)
        self.part.has_loaded_state = True
        self._verify_again()
        self.follow()
        return result

    def initial_weights_of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """CPU tensors with the weights that ``materialise`` would give to ``tensors`` of this rank; not collective.

        The model stays as it is. Raises ``RuntimeError`` for tensors that nothing initialises.
        """
        return self.part.initial_weights_of(tensors)

    def replace_local_tensors(self, replaced: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Replace the first parameter or buffer of each pair by the second, at the end of a load; not collective."""
        if replaced:
            self._upkeep.replace(replaced)
        self.part.loads += 1
        self._verify_again()
        # The next step compares the values, and finds a rank that has not loaded.
        self.follow()

    def refresh(self) -> None:
        """Trace and exchange metadata anew; every rank calls it after ``requires_grad`` or modules changed."""
        self.follow()
        self._verify_again()

    def follow(self) -> None:
        """Follow tensors and modules that were moved, loaded or replaced."""
        self._upkeep.follow()
        self._replicas.follow()
        if self._next_step.follow():
            warn_of_traced_hooks(self.original_module, self.partition.layers)
        self._programs.forget()
        self._runner.forget_engines()

    def _verify_again(self) -> None:
        self._replicas.verify_again()
        self._steps.verify_again()

    def check_materialised(self) -> None:
        """Raise ``RuntimeError`` while tensors of this rank are on the meta device."""
        self.part.check_materialised()

    @property
    def _last_rank(self) -> int:
        return self.schedule.placement.rank_of(self.partition.stages - 1)

    def _make_ready(self) -> None:
        self._check_modules()
        self.check_materialised()

    def _check_modules(self) -> None:
        if self._next_step.has_replacements():
            self.follow()
        self._next_step.check_modules()

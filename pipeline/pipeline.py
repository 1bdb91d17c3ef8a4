"""Pipeline: a module cut into stages, of which this rank holds and runs its own.

::

    module ─ trace ─▶ graph ─ make_partition ─▶ Partition ─┬─▶ ProgramCache   a program for each spec of inputs
                                                           ├─▶ LocalPart      this rank's parameters; others are freed
                                                           └─▶ StepRunner     prepare, verify, run, finish a step
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from nxdpp.agreement.exchange import ReplicaExchanges
from nxdpp.agreement.last_used import LastUsed
from nxdpp.gradients.gradient_norm import clip_grad_norm, dtype_of_norm
from nxdpp.gradients.mean_loss import mean_loss
from nxdpp.gradients.overlapped_average import AverageReport
from nxdpp.gradients.replica_gradients import ReplicaGradients
from nxdpp.gradients.shards.rank_shards import RankShards
from nxdpp.pipeline import arguments
from nxdpp.pipeline.batch import Batches
from nxdpp.pipeline.config import PipelineConfig
from nxdpp.pipeline.first_partition import first_partition
from nxdpp.pipeline.local.changes import Change, ChangeRecord
from nxdpp.pipeline.local.local_module import stage_module
from nxdpp.pipeline.local.other_wrappers import refuse_other_wrappers
from nxdpp.pipeline.local.part import LocalPart
from nxdpp.pipeline.local.refused_models import refuse_grouped_experts, refuse_lost_ties
from nxdpp.pipeline.local.spine_hooks import warn_of_traced_hooks
from nxdpp.pipeline.local.upkeep import LocalUpkeep
from nxdpp.pipeline.loss.normalization import LossNormalization
from nxdpp.pipeline.participants import Participants
from nxdpp.pipeline.partition.partition import Partition
from nxdpp.pipeline.prepared_step import Evaluation, StepPreparation
from nxdpp.pipeline.runtime.engines import Engines
from nxdpp.pipeline.stages.loss import LossTransform
from nxdpp.pipeline.stages.program_cache import ProgramCache
from nxdpp.pipeline.step import StepRunner
from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults import failure_watch
from nxdpp.ranks.faults.board import Call, board
from nxdpp.schedules.chosen import ChosenSchedule
from nxdpp.tensor.move_model_to_device import move_model_to_device
from nxdpp.tensor.tensor_copies import TensorCopies
from nxdpp.tracing.graph.trace import TracingOptions


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
        cut_modules: names of modules that are not layers and that a cut follows.
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

    schedule: ChosenSchedule
    partition: Partition

    @board.construction()
    def __init__(self, module: nn.Module, config: PipelineConfig, agreed: Mapping[str, Any] | None = None) -> None:
        self.rank = parallel_state.get_pipeline_model_parallel_rank()
        if not isinstance(config, PipelineConfig):
            raise TypeError(f"the configuration must be a PipelineConfig, not {config!r:.80}: PipelineConfig(...).")
        if isinstance(module, Pipeline):
            raise TypeError("the model is a Pipeline already. Use it as it is (train_step), or build the model again.")
        self.original_module = module
        self.config = config
        number = board.pipelines + 1
        options = self._trace_and_cut()
        common = _common_settings(config, number, agreed or {})
        changes = ChangeRecord()
        self.exchanges = ReplicaExchanges(
            {
                **common,
                "num_microbatches": config.num_microbatches,
                "output_loss_value_spec": config.output_loss_value_spec,
                "loss_fn": config.loss_fn,
                "grad_scaler": config.grad_scaler is not None,
            }
        )
        normalization = LossNormalization(module, config, self.exchanges)
        normalization.check_example(self.partition, options)
        warn_of_traced_hooks(module, self.partition.layers)
        arguments.warn_of_own_listings(module)
        arguments.warn_of_idle_ranks(self.schedule)
        self._programs = ProgramCache(
            self.partition,
            options,
            config.output_loss_value_spec,
            self.local_stages,
            {
                "schedule": self.schedule.name,
                "stages": self.partition.stages,
                "pipeline_cuts": list(self.partition.cuts),
                "num_microbatches": config.num_microbatches,
                "batch_dimension": config.batch_dimension,
                "shared_inputs": None if config.shared_inputs is None else list(config.shared_inputs),
                **common,
                "writes a timeline": config.trace_file_path is not None,
                "check_against_module": config.check_against_module,
                "check_inputs": config.check_inputs,
            },
            changes,
        )
        self._engines = Engines(config, self.schedule, self.rank)
        # From here on the parameters of other stages are freed.
        self.part = LocalPart(
            module,
            self.partition.owners_by_rank(self.schedule.placement.rank_of),
            self.rank,
            self.partition.layers,
            torch.initial_seed(),
            config.param_init_fn,
            changes,
            self.partition.owners,
        )
        self.local_module: nn.Module = self.part.module
        self.tied_names = self.part.aliases
        self._replicas = ReplicaGradients(self.part, self.exchanges, config.gradient_reduction == "mean")
        self._copies = TensorCopies(self.part.module)
        self._shards: RankShards | None = None
        self._participants = Participants(
            config, self.partition, self.part, self._replicas, self._copies, self._engines.transport
        )
        self._loss_dtypes: LastUsed[int, torch.dtype] = LastUsed()
        self._upkeep = LocalUpkeep(
            self.part,
            self.partition.layers,
            self._programs.replace,
            self._forget,
            self._verify_again,
            self._has_gathered,
        )
        self._batches = Batches(self.part, self._upkeep, config, normalization)
        self._preparation = StepPreparation(config, self._programs, normalization)
        self._runner = StepRunner(
            config,
            self._last_rank,
            self._engines,
            self.part,
            self._upkeep,
            self._replicas,
            self._participants,
        )
        if self.part.is_initialised_at_once:
            self.materialise()
        board.pipelines = number

    def _trace_and_cut(self) -> TracingOptions:
        """Check the settings, choose the schedule and the stage of each layer; collective for "profiled" costs."""
        module, config = self.original_module, self.config
        config.check(module)
        refuse_other_wrappers(module)
        refuse_grouped_experts(module, parallel_state.local_device())
        refuse_lost_ties(module)
        self.schedule = config.choose_schedule(parallel_state.get_pipeline_model_parallel_size())
        options = config.tracing_options(module)
        self.layer_classes = options.layer_classes
        self.cut_modules = options.cut_modules
        names = None if config.input_names is None else config.of_module(module, config.input_names)
        policy = config.partition_policy(module, self.schedule)
        stages = self.schedule.placement.stages
        self.partition = first_partition(module, options, stages, policy, names, config.partition_batch)
        self._last_rank = self.schedule.placement.rank_of(self.partition.stages - 1)
        return options

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
    def average_report(self) -> AverageReport:
        """Figures of the last average of gradients that began during a step."""
        return self._replicas.report

    @property
    def busy_share(self) -> float:
        """Share of the last step, between 0 and 1, in which this rank computed."""
        return 0.0 if self._runner.timer is None else self._runner.timer.busy_share

    @property
    def step_seconds(self) -> float:
        """Seconds of the last step on the device, without the average over replicas."""
        return 0.0 if self._runner.timer is None else self._runner.timer.seconds

    @property
    def action_times(self) -> list[tuple[str, int, int]]:
        """Text, start and end of each compute action of this rank in the last step; empty on XLA."""
        return [] if self._runner.timer is None else self._runner.timer.action_times

    @property
    def sent_bytes(self) -> int:
        """Bytes of the tensors that this rank has sent to other ranks of the pipeline in the last step."""
        return self._runner.sent_bytes

    @property
    def compile_seconds(self) -> float:
        """Seconds in which this process compiled graphs, from the end of the step before to the end of the last."""
        return self._runner.compile_seconds

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

    def mean_loss(self, losses: Sequence[torch.Tensor], train: bool = True) -> torch.Tensor:
        """Return the mean loss of all microbatches and replicas on every rank; collective over all ranks.

        ``losses`` are the result of a step on this rank, a training step or an evaluation. The mean has their dtype.
        """
        with board.call("mean_loss"), failure_watch.reported():
            if self.holds_last_stage:
                self.exchanges.begin(f"mean loss of {'a training step' if train else 'an evaluation'}")
            known = self._loss_dtypes.get(self._runner.digest)
            loss = mean_loss(losses, self._last_rank, self.device, known)
            self._loss_dtypes[self._runner.digest] = loss.dtype
            return loss

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
        with board.call("clip_grad_norm"):
            parameters = list(self.local_module.parameters())
            own = dtype_of_norm(each.grad for each in parameters if each.grad is not None)
            dtype = self._replicas.optimizers.note_clipping(float(max_norm), float(norm_type), own)
            return clip_grad_norm(parameters, max_norm, norm_type, dtype=dtype)

    def check_equal_replicas(self) -> None:
        """Raise ``RuntimeError`` for replicas with different parameters; collective over them."""
        self._replicas.check_values()

    @property
    def shards(self) -> RankShards | None:
        """The units of this rank's parameters; ``None`` where they are whole."""
        return self._shards

    def _has_gathered(self) -> bool:
        return self.shards is not None and any(unit.is_whole for unit in self.shards.units)

    def whole_parameters(self) -> AbstractContextManager[None]:
        """Return a context with sharded parameters whole; collective over the replicas where they are sharded."""
        return nullcontext() if self.shards is None else self.shards.whole()

    def set_shards(self, shards: RankShards) -> None:
        """Run ``shards``, which this rank's parameters have become, from the next step on; on all ranks."""
        self._shards = shards
        self._participants.add_shards(shards)
        self.part.changes.note(Change.PARAMETER)
        self._upkeep.follow()
        self.materialise()
        move_model_to_device(self.local_module, parallel_state.local_device())
        self._upkeep.follow()

    def generate(self, *positional: Any, num_microbatches: int = 1, **arguments: Any) -> Any:
        """Generate tokens as ``NxDPPModel.generate``; collective over the ranks of a pipeline."""
        from nxdpp.generation.generate import generate

        return generate(self, positional, num_microbatches, arguments)

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
            self._upkeep.move_to(target, self._engines.transport)

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

    def expect_inputs(self, names: Sequence[str]) -> None:
        """Take exactly the inputs ``names`` in each step from now on. Raises ``ValueError`` for names of no inputs."""
        self.config.check_input_names(self.original_module, names)
        self._batches.input_names = tuple(names)

    def refresh(self) -> None:
        """Trace and exchange metadata anew; every rank calls it after ``requires_grad`` or modules changed."""
        self._upkeep.follow()
        self._verify_again()

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
        self._engines.forget()
        self._loss_dtypes.clear()

    def _verify_again(self) -> None:
        """Have the ranks compare the parameters again."""
        self._replicas.verify_again()
        self._copies.verify_again()


def _common_settings(config: PipelineConfig, number: int, agreed: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that the ranks of a pipeline compare, and the replicas too."""
    return {
        **agreed,
        "number of the wrapped model": number,
        "loss_over": config.loss_over,
        "loss_normalization": config.loss_normalization,
        "count_items_fn": config.count_items_fn is not None,
        "gradient_reduction": config.gradient_reduction,
        "grad_scaler": None if config.grad_scaler is None else config.grad_scaler.settings(),
    }


def _call(name: str) -> Call:
    return board.call(name, "step", "pipeline", has_limit=True)

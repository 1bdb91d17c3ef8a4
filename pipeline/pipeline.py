"""Pipeline: a module cut into stages, of which this rank holds and runs its own.

::

    module ─ trace ─▶ graph ─ make_partition ─▶ Partition ─┬─▶ ProgramCache   a program for each spec of inputs
                                                           ├─▶ LocalPart      this rank's parameters; others are freed
                                                           └─▶ StepRunner     prepare, verify, run, finish a step
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from nxdpp import upward
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
from nxdpp.pipeline.partition.partition import Partition
from nxdpp.pipeline.pipeline_steps import PipelineSteps
from nxdpp.pipeline.prepared_step import StepPreparation
from nxdpp.pipeline.runtime.engines import Engines
from nxdpp.pipeline.stages.program_cache import ProgramCache
from nxdpp.pipeline.step import StepRunner
from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults import failure_watch
from nxdpp.ranks.faults.board import board
from nxdpp.schedules.chosen import ChosenSchedule
from nxdpp.tensor.move_model_to_device import move_model_to_device
from nxdpp.tensor.tensor_copies import TensorCopies
from nxdpp.tracing.graph.trace import TracingOptions


class Pipeline(PipelineSteps):
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
            self.partition,
            self._last_rank,
            self._engines,
            self.part,
            self._upkeep,
            self._replicas,
            self._copies,
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
        return self._engines.shards

    def _has_gathered(self) -> bool:
        return self.shards is not None and any(unit.is_whole for unit in self.shards.units)

    def whole_parameters(self) -> AbstractContextManager[None]:
        """Return a context with sharded parameters whole; collective over the replicas where they are sharded."""
        return nullcontext() if self.shards is None else self.shards.whole()

    def set_shards(self, shards: RankShards) -> None:
        """Run ``shards``, which this rank's parameters have become, from the next step on; on all ranks."""
        self._engines.shards = shards
        self.part.changes.note(Change.PARAMETER)
        self._upkeep.follow()
        self.materialise()
        move_model_to_device(self.local_module, parallel_state.local_device())
        self._upkeep.follow()

    def generate(self, *positional: Any, num_microbatches: int = 1, **arguments: Any) -> Any:
        """Generate tokens as ``NxDPPModel.generate``; collective over the ranks of a pipeline."""
        return upward.generate(self, positional, num_microbatches, arguments)

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

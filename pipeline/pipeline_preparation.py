"""Preparation of a pipeline: all of it that is made, and may be refused, before a parameter is freed.

::

    module, PipelineConfig ─ check ─▶ schedule ─ trace, cut ─▶ Partition ─▶ ProgramCache, StepPreparation, StepRunner
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nxdpp.parallel_layers import parallel_state
from nxdpp.parallel_layers.faults.board import board
from nxdpp.pipeline import arguments
from nxdpp.pipeline.config import PipelineConfig
from nxdpp.pipeline.first_partition import first_partition
from nxdpp.pipeline.local.grouped_experts import refuse_grouped_experts
from nxdpp.pipeline.local.lost_ties import refuse_lost_ties
from nxdpp.pipeline.local.other_wrappers import refuse_other_wrappers
from nxdpp.pipeline.local.spine_hooks import warn_of_traced_hooks
from nxdpp.pipeline.loss.normalization import LossNormalization
from nxdpp.pipeline.partition.partition import Partition
from nxdpp.pipeline.replicas.exchange import ReplicaExchanges
from nxdpp.pipeline.runtime.step_runner import StepRunner
from nxdpp.pipeline.stages.loss import LossGradient
from nxdpp.pipeline.stages.program_cache import ProgramCache
from nxdpp.pipeline.step_preparation import StepPreparation
from nxdpp.schedules.chosen import ChosenSchedule
from nxdpp.schedules.timeline_file import check_path
from nxdpp.tracing.trace import TracingOptions


@dataclass(frozen=True)
class PreparedPipeline:
    """A pipeline of which this rank still holds the whole model.

    Attributes:
        module: the whole model.
        config: settings of the pipeline.
        rank: this rank of the pipeline.
        number: of the wrapped model among those of this process, from 1.
        schedule: the schedule with its placement of stages on ranks.
        options: of the trace.
        partition: the stage of each layer and parameter.
        exchanges: those with the data-parallel replicas.
        normalization: of the loss.
        programs: graphs and programs, by specs of inputs.
        steps: makes a ``PreparedStep`` of a batch.
        runner: runs it.
        loss_gradient: gradient that the backward of a loss begins with.
    """

    module: nn.Module
    config: PipelineConfig
    rank: int
    number: int
    schedule: ChosenSchedule
    options: TracingOptions
    partition: Partition
    exchanges: ReplicaExchanges
    normalization: LossNormalization
    programs: ProgramCache
    steps: StepPreparation
    runner: StepRunner
    loss_gradient: LossGradient

    @property
    def last_rank(self) -> int:
        """The rank of the last stage."""
        return self.schedule.placement.rank_of(self.partition.stages - 1)


def prepare_pipeline(
    module: nn.Module, config: PipelineConfig, rank: int, agreed: Mapping[str, Any]
) -> PreparedPipeline:
    """Trace and cut ``module`` for pipeline rank ``rank``; collective only for ``partition="profiled"``.

    ``agreed`` are other settings that must be equal on every rank. Raises as ``Pipeline`` does, and changes nothing.
    """
    # Check, and choose the schedule.
    config.check(module)
    refuse_other_wrappers(module)
    refuse_grouped_experts(module, parallel_state.local_device())
    refuse_lost_ties(module)
    schedule = config.choose_schedule(parallel_state.get_pipeline_model_parallel_size())
    # Trace and cut.
    options = config.tracing_options(module)
    names = None if config.input_names is None else config.of_module(module, config.input_names)
    policy = config.partition_policy(module, schedule)
    partition = first_partition(module, options, schedule.placement.stages, policy, names, config.partition_batch)
    # Prepare the loss.
    number = board.pipelines + 1
    common = _common_settings(config, number, agreed)
    spec = config.output_loss_value_spec
    of_replicas = {
        "num_microbatches": config.num_microbatches,
        "output_loss_value_spec": spec,
        "loss_fn": config.loss_fn,
        "grad_scaler": config.grad_scaler is not None,
    }
    exchanges = ReplicaExchanges({**common, **of_replicas})
    normalization = LossNormalization(module, config.loss_normalization, config.count_items_fn, spec, exchanges)
    normalization.check_example(partition, options, config.input_names, config.partition_batch)
    loss_gradient = torch.ones_like if config.grad_scaler is None else config.grad_scaler.loss_gradient
    warn_of_traced_hooks(module, partition.layers)
    arguments.warn_of_own_listings(module)
    # Prepare the steps.
    timeline_path = None if config.trace_file_path is None else check_path(config.trace_file_path)
    settings = {
        "schedule": schedule.name,
        "stages": partition.stages,
        "pipeline_cuts": list(partition.cuts),
        "num_microbatches": config.num_microbatches,
        **common,
        "writes a timeline": timeline_path is not None,
        "check_against_module": config.check_against_module,
        "check_inputs": config.check_inputs,
    }
    programs = ProgramCache(partition, options, spec, schedule.placement.stages_of(rank), settings)
    keeps_outputs = not config.deallocate_pipeline_outputs
    runner = StepRunner(schedule, rank, keeps_outputs, config.check_inputs, timeline_path, loss_gradient)
    steps = StepPreparation(module, config, programs, normalization)
    return PreparedPipeline(
        module,
        config,
        rank,
        number,
        schedule,
        options,
        partition,
        exchanges,
        normalization,
        programs,
        steps,
        runner,
        loss_gradient,
    )


def _common_settings(config: PipelineConfig, number: int, agreed: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that the ranks of a pipeline compare, and the replicas too."""
    return {
        **agreed,
        "number of the wrapped model": number,
        "loss_normalization": config.loss_normalization,
        "count_items_fn": config.count_items_fn is not None,
        "gradient_reduction": config.gradient_reduction,
        "grad_scaler": None if config.grad_scaler is None else config.grad_scaler.settings(),
    }

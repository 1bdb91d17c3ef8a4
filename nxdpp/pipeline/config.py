"""Configuration of a pipeline, verified before anything is changed.

``Settings`` has the names, types and defaults of ``NxDPPModel``, which documents them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import ismodule
from numbers import Integral
from types import MappingProxyType, ModuleType
from typing import Any, Generic, Literal, cast

import torch
from torch import fx, nn
from typing_extensions import TypeVar

from nxdpp.gradients.expert_parameters import is_of_experts
from nxdpp.gradients.grad_scaler import GradScaler, check_grad_scaler
from nxdpp.initialization.initialisers import check_param_init_fn
from nxdpp.pipeline import arguments
from nxdpp.pipeline.arguments import PostPartitionHook
from nxdpp.pipeline.input_names import check_names, check_required
from nxdpp.pipeline.loss.batch_loss import BatchLoss, check_forwards_first
from nxdpp.pipeline.loss.item_counts import CountItems, check_normalization
from nxdpp.pipeline.manual_pipe_stage import StageOfLayers, manual_model
from nxdpp.pipeline.microbatches.batch_dimension import BatchDimension, check_batch_dimension, named_inputs
from nxdpp.pipeline.microbatches.split_batch import SplitInputs
from nxdpp.pipeline.partition.balanced_partition import CostPolicy
from nxdpp.pipeline.partition.partition import GivenCuts, Partition, PartitionPolicy, even, modules_to_cut_after
from nxdpp.pipeline.stages.loss import LossGradient, LossSpec, check_loss_spec
from nxdpp.ranks import parallel_state
from nxdpp.schedules.chosen import ChosenSchedule, Written
from nxdpp.schedules.timeline_file import check_path
from nxdpp.tracing.graph.trace import TracingOptions
from nxdpp.tracing.models.loss_function import LossFunction
from nxdpp.tracing.modules.layers import find_layer_classes, known_leaves, resolve_classes
from nxdpp.tracing.values.input_dicts import InputDict, open_inputs

# Settings that all ranks of all replicas have alike.
_AGREED = (
    "broadcast_and_average_loss", "use_zero1_optimizer", "loss_over", "loss_normalization", "gradient_reduction",
)  # fmt: skip

# By two flags for losses, type checkers know the result of ``run_train``.
PerMicrobatch = TypeVar("PerMicrobatch", bool, Literal[True], Literal[False], covariant=True, default=Literal[False])
"""The type of ``return_mb_loss``."""

# A function that takes an ``NxDPPModel`` without parameters takes one that broadcasts its loss too.
OnEveryRank = TypeVar("OnEveryRank", bool, Literal[True], Literal[False], covariant=True, default=bool)
"""The type of ``broadcast_and_average_loss``."""


@dataclass(eq=False)
class Settings(Generic[OnEveryRank, PerMicrobatch]):
    """Arguments of ``NxDPPModel``, in the order of NeuronX Distributed."""

    module: nn.Module | Sequence[nn.Module]
    transformer_layer_cls: Any | None = None
    num_microbatches: int = 1
    virtual_pipeline_size: int = 1
    output_loss_value_spec: LossSpec = None
    return_mb_loss: PerMicrobatch = False  # type: ignore[assignment]  # solved by the default
    broadcast_and_average_loss: OnEveryRank = False  # type: ignore[assignment]  # as above
    pipeline_cuts: Sequence[str] | None = None
    input_names: Sequence[str] | None = None
    leaf_module_cls: Sequence[Any] | None = None
    autowrap_functions: Sequence[Callable[..., Any] | ModuleType] | None = None
    autowrap_modules: Sequence[Callable[..., Any] | ModuleType] | None = None
    tracer_cls: str | type[fx.Tracer] | None = None
    param_init_fn: Any | None = None
    trace_file_path: str | None = None
    use_zero1_optimizer: bool = False
    auto_partition: bool | None = False
    deallocate_pipeline_outputs: bool = False
    partition: str | PartitionPolicy = "even"
    partition_batch: Mapping[str, Any] | None = None
    partition_memory_limit: int | None = None
    schedule: Written | None = None
    post_partition_hooks: Sequence[PostPartitionHook] | None = None
    split_inputs_fn: SplitInputs | None = None
    check_against_module: str | None = None
    loss_normalization: str = "microbatch"
    count_items_fn: CountItems | None = None
    grad_scaler: GradScaler | None = None
    check_inputs: str = "first"
    use_optimizer_wrapper: bool = False
    fuse_microbatches: bool = False
    return_loss_on_cpu: bool = False
    loss_fn: Callable[..., Any] | None = None
    shared_inputs: Sequence[str] | None = None
    autowrap_obj_methods: Mapping[Any, Sequence[str]] | None = None
    manual_pp_partition: bool = False
    manual_pp_stage_partition_fn: StageOfLayers | None = None
    manual_pp_loss_fn: Callable[[Any, Any], Any] | None = None
    batch_dimension: BatchDimension | None = None
    loss_over: str = "microbatch"
    gradient_reduction: str = "mean"

    def __post_init__(self) -> None:
        """Make Python numbers of whole numbers of NumPy, which ranks could not compare as text."""
        for name in ("num_microbatches", "virtual_pipeline_size", "partition_memory_limit"):
            value = getattr(self, name)
            if isinstance(value, Integral) and not isinstance(value, int):
                setattr(self, name, int(value))
        if self.auto_partition and self.pipeline_cuts is not None and not len(self.pipeline_cuts):
            self.pipeline_cuts = None


class PipelineConfig(Settings[bool, bool]):
    """The settings of a model, with what follows from them. Attributes and defaults are those of ``Settings``."""

    @property
    def root(self) -> nn.Module:
        """The model, a module."""
        return cast(nn.Module, self.module)

    def resolve(self) -> None:
        """Make a module, with its cuts and its loss, of the layers of a manual partition."""
        arguments.check_manual(self)
        if self.manual_pp_partition:
            self.module, self.transformer_layer_cls, self.pipeline_cuts, self.loss_fn = manual_model(
                *(self.module, self.virtual_pipeline_size), *(self.manual_pp_stage_partition_fn, self.manual_pp_loss_fn)
            )

    def check(self) -> None:
        """Raise ``ValueError`` or ``TypeError`` for a setting that the model cannot honour."""
        module = self.root
        self.post_partition_hooks = arguments.checked_hooks(self.post_partition_hooks)
        arguments.check_choices(self)
        arguments.check_kinds(self)
        check_param_init_fn(self.param_init_fn, module)
        if self.trace_file_path is not None:
            check_path(self.trace_file_path)
            parallel_state.refuse_in_debug("trace_file_path")
        arguments.check_number_of_microbatches(self.num_microbatches)
        arguments.check_split_inputs_fn(self.split_inputs_fn)
        check_batch_dimension(self.batch_dimension)
        arguments.check_tracer(self.tracer_cls)
        arguments.check_wraps(self.autowrap_functions or (), self.autowrap_modules or ())
        check_loss_spec(self.output_loss_value_spec)
        if self.loss_fn is not None:
            LossFunction.of(self.loss_fn)
        check_normalization(module, self.loss_normalization, self.count_items_fn, self.loss_function)
        check_grad_scaler(self.grad_scaler)
        if self.input_names is not None:
            self.check_input_names(self.input_names)
        if self.shared_inputs is not None:
            of_forward = [name.partition("[")[0] for name in self.shared_inputs]
            check_names(module, self.of_module(of_forward), "shared_inputs")
        check_names(module, self.of_module(named_inputs(self.batch_dimension)), "batch_dimension")
        arguments.check_partition(self.partition, self._opened_batch(), self.partition_memory_limit, self.pipeline_cuts)
        if self.partition == "profiled" and (ranks := parallel_state.get_tensor_model_parallel_size()) > 1:
            # The layers of one rank would wait for the layers of the others.
            raise ValueError(
                f"partition='profiled' measures layers on one rank, and layers that are divided over {ranks} "
                f"tensor-parallel ranks do not run there alone. Use partition='balanced'."
            )
        if any(map(is_of_experts, module.parameters())):
            ranks = parallel_state.get_expert_model_parallel_size()
            self._check_divided("expert_parallelize has divided the experts", "expert_model_parallel_size", ranks)
        if parallel_state.model_parallel_is_initialized():
            self._check_context(module, parallel_state.get_context_model_parallel_size())
        if self.partition_batch is not None:
            self.check_input_names(list(self.partition_batch), "partition_batch")

    def _check_context(self, module: nn.Module, ranks: int) -> None:
        """Raise ``ValueError`` for a module whose sequences are whole, and for settings that take them for whole."""
        if ranks == 1:
            return
        if not any(getattr(each, "divides_sequences", False) for each in module.modules()):
            raise ValueError(
                f"context_parallel_size={ranks}, and the sequences of {type(module).__name__} are not divided: wrap "
                f"NxDPPModel(nxdpp.context_parallelize(module), ...), or leave the size out."
            )
        more = {
            "loss_fn, which is given the outputs of this rank's tokens": self.loss_fn is not None,
            "gradient_reduction='sum', which was not compared": self.gradient_reduction == "sum",
        }
        self._check_divided("context_parallelize has divided sequences", "context_parallel_size", ranks, more)

    def _check_divided(
        self, whose: str, argument: str, ranks: int, more: Mapping[str, bool] = MappingProxyType({})
    ) -> None:
        """Raise ``ValueError`` for settings that take a rank for a whole replica, and for ``more``."""
        refused = {
            **more,
            f"check_against_module={self.check_against_module!r}, which runs the whole model on each rank": (
                self.check_against_module is not None
            ),
            "partition='profiled', which runs layers on one rank": self.partition == "profiled",
        }
        for what, is_set in refused.items():
            if is_set:
                raise ValueError(
                    f"{whose} over {ranks} ranks, and does not go with {what}: leave it out, or train with "
                    f"{argument}=1."
                )

    def agreed_by_replicas(self, number: int) -> dict[str, Any]:
        """Return what data-parallel replicas must have alike; ``number`` counts the wrapped models of this process."""
        return {
            **self._agreed_by_all(number),
            "num_microbatches": self.num_microbatches,
            "output_loss_value_spec": self.output_loss_value_spec,
            "loss_fn": self.loss_fn,
            "grad_scaler": self.grad_scaler is not None,
        }

    def agreed_by_ranks(self, number: int, schedule: ChosenSchedule, partition: Partition) -> dict[str, Any]:
        """Return what the ranks of a pipeline must have alike."""
        return {
            "schedule": schedule.name,
            "stages": partition.stages,
            "pipeline_cuts": list(partition.cuts),
            "num_microbatches": self.num_microbatches,
            "batch_dimension": self.batch_dimension,
            "shared_inputs": None if self.shared_inputs is None else list(self.shared_inputs),
            **self._agreed_by_all(number),
            "writes a timeline": self.trace_file_path is not None,
            "check_against_module": self.check_against_module,
            "check_inputs": self.check_inputs,
        }

    def _agreed_by_all(self, number: int) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in _AGREED},
            "number of the wrapped model": number,
            "count_items_fn": self.count_items_fn is not None,
            "grad_scaler": None if self.grad_scaler is None else self.grad_scaler.settings(),
        }

    @property
    def loss_function(self) -> LossFunction | None:
        """``loss_fn`` with the names of its inputs."""
        if self.loss_fn is None:
            return None
        function = LossFunction.of(self.loss_fn)
        return function if self.batch_loss is None else replace(function, function=self.batch_loss)

    @cached_property
    def batch_loss(self) -> BatchLoss | None:
        """The collector of a step's outputs for ``loss_over="batch"``; ``None`` for losses of microbatches."""
        if self.loss_over != "batch" or self.loss_fn is None:
            return None
        return BatchLoss(self.loss_fn, self.batch_dimension, self.loss_gradient)

    @property
    def loss_gradient(self) -> LossGradient:
        """A function of a loss that gives the gradient with which its backward begins: 1, or the scaler's scale."""
        return torch.ones_like if self.grad_scaler is None else self.grad_scaler.loss_gradient

    def of_module(self, names: Sequence[str]) -> list[str]:
        """Return the ``names`` of inputs, except the ones that go only to ``loss_fn``."""
        alone = () if self.loss_function is None else self.loss_function.names_alone(self.root)
        return [name for name in names if name not in alone]

    def check_input_names(self, names: Sequence[str], argument: str = "input_names") -> None:
        """Raise ``ValueError`` unless ``names`` are names of inputs of the model or ``loss_fn``, all that it needs."""
        own = self.of_module(names)
        check_names(self.root, own, argument)
        check_required(self.root, own, argument)

    def choose_schedule(self, ranks: int) -> ChosenSchedule:
        """Return the schedule for ``ranks``. Raises ``ValueError`` for one that cannot run."""
        chosen = ChosenSchedule(self.schedule, ranks, self.num_microbatches, self.virtual_pipeline_size)
        if self.loss_over == "batch":
            check_forwards_first(chosen)
        return chosen

    def tracing_options(self) -> TracingOptions:
        """Return the options for tracing the model. Raises ``ValueError`` for a class that it does not have."""
        module = self.root
        layer_classes = find_layer_classes(module, self.transformer_layer_cls)
        wrapped: list[Any] = [*(self.autowrap_functions or ()), *(self.autowrap_modules or ())]
        return TracingOptions(
            layer_classes=layer_classes,
            leaf_classes=resolve_classes(module, known_leaves(module, self.leaf_module_cls or ()), "leaf_module_cls"),
            autowrap_functions=tuple(each for each in wrapped if not ismodule(each)),
            autowrap_modules=tuple(each for each in wrapped if ismodule(each)),
            tracer_cls=self.tracer_cls,
            cut_modules=modules_to_cut_after(module, self.pipeline_cuts or (), layer_classes),
            loss_function=self.loss_function,
        )

    def partition_policy(self, schedule: ChosenSchedule) -> PartitionPolicy:
        """Return the policy that chooses the cuts."""
        if self.pipeline_cuts is not None:
            return GivenCuts(self.pipeline_cuts)
        if not isinstance(self.partition, str):
            return self.partition
        batch = self._opened_batch()
        if self.partition == "even" or batch is None:
            return even
        limit, zero1 = self.partition_memory_limit, self.use_zero1_optimizer
        return CostPolicy(self.root, batch, self.partition, schedule, limit, zero1)

    def _opened_batch(self) -> Any:
        """Return ``partition_batch`` with the values of each container as inputs of their own."""
        batch: Any = self.partition_batch
        if not isinstance(batch, Mapping):
            return batch
        opened = open_inputs(batch, all_kinds=True)
        return {name: value for name, value in opened.items() if not isinstance(value, InputDict)}

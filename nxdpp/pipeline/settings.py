"""Settings of ``NxDPPModel``, which documents them: its constructor has these names, types and defaults."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from types import ModuleType
from typing import Any, Generic, Literal

from torch import fx, nn
from typing_extensions import TypeVar

from nxdpp.gradients.grad_scaler import GradScaler
from nxdpp.pipeline.arguments import PostPartitionHook
from nxdpp.pipeline.loss.item_counts import CountItems
from nxdpp.pipeline.manual_pipe_stage import StageOfLayers
from nxdpp.pipeline.microbatches.batch_dimension import BatchDimension
from nxdpp.pipeline.microbatches.split_batch import SplitInputs
from nxdpp.pipeline.partition.partition import PartitionPolicy
from nxdpp.pipeline.stages.loss import LossSpec
from nxdpp.schedules.chosen import Written

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

"""Configuration of a pipeline, verified before anything is changed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import ismodule
from numbers import Integral
from types import ModuleType
from typing import Any

import torch
from torch import fx, nn

from nxdpp.gradients.grad_scaler import GradScaler, check_grad_scaler
from nxdpp.initialization.initialisers import check_param_init_fn
from nxdpp.pipeline import arguments
from nxdpp.pipeline.input_names import check_names, check_required
from nxdpp.pipeline.loss.batch_loss import BatchLoss, check_forwards_first, check_loss_over
from nxdpp.pipeline.loss.item_counts import CountItems, check_normalization
from nxdpp.pipeline.microbatches.batch_dimension import BatchDimension, check_batch_dimension, named_inputs
from nxdpp.pipeline.microbatches.split_batch import SplitInputs
from nxdpp.pipeline.partition.balanced_partition import CostPolicy
from nxdpp.pipeline.partition.partition import GivenCuts, PartitionPolicy, even, modules_to_cut_after
from nxdpp.pipeline.stages.loss import LossGradient, LossSpec, check_loss_fn, check_loss_spec
from nxdpp.ranks import parallel_state
from nxdpp.ranks.known_keywords import knows_its_keywords
from nxdpp.schedules.chosen import ChosenSchedule, Written
from nxdpp.schedules.timeline_file import check_path
from nxdpp.tracing.graph.trace import TracingOptions
from nxdpp.tracing.models.loss_function import LossFunction
from nxdpp.tracing.modules.layers import find_layer_classes, known_leaves, resolve_classes
from nxdpp.tracing.values.input_dicts import InputDict, open_inputs


@dataclass(frozen=True)
class PipelineConfig:
    """Settings of a ``Pipeline``, equal on all ranks.

    Attributes:
        num_microbatches: number of microbatches of a step.
        virtual_pipeline_size: stages of each rank. 1 leaves the number to the schedule.
        schedule: name of a family, path of a CSV file, or the actions of each rank. By default ``"1f1b"``, and
            ``"interleaved"`` for several stages per rank.
        transformer_layer_cls: class, or name of a class, of the layers, or a list of these. By default the classes that
            Hugging Face models in it declare, otherwise the longest run of equal modules.
        pipeline_cuts: names of the layers, or of modules next to them (an embedding, a norm), after which to cut.
        partition: ``"even"``, ``"balanced"``, ``"profiled"``, or a ``PartitionPolicy``: a function of the traced graph
            and the number of stages that returns ``pipeline_cuts``.
        partition_batch: inputs of one microbatch with labels, for the trace at construction and for costs. Meta tensors
            are allowed.
        partition_memory_limit: bytes of one rank for ``"balanced"`` and ``"profiled"``. They hold its weights,
            gradients, AdamW's state and the activations that the schedule keeps.
        shares_optimizer_state: whether the data-parallel replicas share the optimizer state (ZeRO-1). Of AdamW's state
            ``partition_memory_limit`` then counts an equal part, of float32 at least.
        input_names: names of the inputs of every step. By default any.
        split_inputs_fn: a function of the inputs, a dict, and ``num_microbatches``. It returns the inputs of each
            microbatch, for inputs whose first dimension is not the batch. By default tensors are split along
            dimension 0, and images of transformers' models go with their rows.
        shared_inputs: names of inputs whose tensors go whole to each microbatch, such as a mask (T, T); for a value in
            a dict, ``"batch['mask']"``. By default none, and tensors that may be such are refused: in a batch of T rows
            of T tokens, tensors (T,), and floating and boolean ones (T, T), unless a batch of other sizes has shown
            that they have a part for each row. An empty list splits them.
        batch_dimension: the dimension of inputs that has the rows of the batch, or a dict of dimensions by the names of
            inputs, whose others are split along 0. Tensors of fewer dimensions are split along their last one. Outputs
            of an evaluation are joined along the one that has the rows of a microbatch, or along ``"return"`` of the
            dict. By default 0, and inputs that modules with ``batch_first=False`` may take with the sequence first,
            such as (T, B) and (T, B), are refused with the question; labels (B,) beside whole numbers (B, T) or
            floating ones (B, T, H) answer it. So are states (layers, B, H) of as many rows as layers.
        output_loss_value_spec: position of the loss in the output.
        loss_fn: a function of the model's output and of inputs by name, ``loss_fn(output, labels)``. It returns the
            loss of a microbatch, a tensor of one element. It runs on the last stage, as a single node. An input that
            ``forward`` has no parameter for goes only to ``loss_fn``. By default the output has the loss.
        loss_over: ``"microbatch"``, or ``"batch"``: ``loss_fn`` is called once a step, on the outputs and inputs of all
            microbatches, as in one process, for losses that look at other rows. Replicas have losses of their own. For
            schedules in which all forwards of the last stage come first, such as ``"gpipe"``.
        loss_normalization: ``"microbatch"``, the mean of the microbatches' losses, or ``"tokens"``, the mean over all
            labels of the batch. Replicas are included.
        count_items_fn: a function of a microbatch's inputs, for ``"tokens"``. It returns the number of items over which
            the model's loss is a mean. By default a transformers model gets ``num_items_in_batch``.
        gradient_reduction: ``"mean"``, gradients of the mean loss over microbatches and replicas, or ``"sum"``,
            gradients of the sum of all losses. The losses that a step returns are the same.
        leaf_module_cls, autowrap_functions, autowrap_modules, tracer_cls: modules and functions that are not traced
            through, and the tracer. Either ``autowrap`` may have functions and Python modules.
        param_init_fn: initialises a model on the meta device: a function of a module, or of a module and a device.
            It initialises the parameters and buffers of this module itself. Random numbers of torch's default
            generator do not depend on the partition; numbers of another generator may. By default ``_init_weights`` of
            transformers' models, or ``reset_parameters``.
        trace_file_path: file for the timeline of each step, a Chrome trace. Replicas other than the first write next to
            it (``trace.pipeline1.json``). An existing file is replaced. Ranks then end a step together.
        deallocate_pipeline_outputs: free an activation after it is sent. Its place in the autograd graph is kept.
        check_against_module: ``"first"`` compares the losses and gradients of the first training step with the
            unwrapped module's. Every rank then holds and runs the whole model once. A difference is a ``RuntimeError``.
        grad_scaler: ``nxdpp.GradScaler`` that scales the loss of each microbatch, for autocast to float16.
        check_inputs: when the ranks of a pipeline compare all values of floating inputs: ``"first"``, in the first step
            of each signature, and a sample of 64 in later ones, ``"always"``, or ``"never"``. Values of other inputs
            are compared in every step.
            With ``"never"`` no warning tells of data-parallel replicas that have the same batch.
    """

    num_microbatches: int = 1
    virtual_pipeline_size: int = 1
    schedule: Written | None = None
    transformer_layer_cls: Any | None = None
    pipeline_cuts: Sequence[str] | None = None
    partition: str | PartitionPolicy = "even"
    partition_batch: Mapping[str, Any] | None = None
    partition_memory_limit: int | None = None
    shares_optimizer_state: bool = False
    input_names: Sequence[str] | None = None
    split_inputs_fn: SplitInputs | None = None
    shared_inputs: Sequence[str] | None = None
    batch_dimension: BatchDimension | None = None
    output_loss_value_spec: LossSpec = None
    loss_fn: Callable[..., Any] | None = None
    loss_over: str = "microbatch"
    loss_normalization: str = "microbatch"
    count_items_fn: CountItems | None = None
    gradient_reduction: str = "mean"
    leaf_module_cls: Sequence[Any] | None = None
    autowrap_functions: Sequence[Callable[..., Any] | ModuleType] | None = None
    autowrap_modules: Sequence[Callable[..., Any] | ModuleType] | None = None
    tracer_cls: str | type[fx.Tracer] | None = None
    param_init_fn: Any | None = None
    trace_file_path: str | None = None
    deallocate_pipeline_outputs: bool = False
    check_against_module: str | None = None
    grad_scaler: GradScaler | None = None
    check_inputs: str = "first"

    def __post_init__(self) -> None:
        """Make Python numbers of whole numbers of NumPy, which ranks could not compare as text."""
        for name in ("num_microbatches", "virtual_pipeline_size", "partition_memory_limit"):
            value = getattr(self, name)
            if isinstance(value, Integral) and not isinstance(value, int):
                object.__setattr__(self, name, int(value))

    def check(self, module: nn.Module) -> None:
        """Raise ``ValueError`` or ``TypeError`` for a setting that ``module`` cannot honour."""
        arguments.check_kinds(
            module,
            pipeline_cuts=self.pipeline_cuts,
            input_names=self.input_names,
            shared_inputs=self.shared_inputs,
            leaf_module_cls=self.leaf_module_cls,
        )
        check_param_init_fn(self.param_init_fn, module)
        if self.trace_file_path is not None:
            check_path(self.trace_file_path)
            parallel_state.refuse_in_debug("trace_file_path")
        arguments.check_number_of_microbatches(self.num_microbatches)
        arguments.check_split_inputs_fn(self.split_inputs_fn, self.shared_inputs)
        check_batch_dimension(self.batch_dimension, self.split_inputs_fn)
        arguments.check_tracer(self.tracer_cls)
        arguments.check_wraps(self.autowrap_functions or (), self.autowrap_modules or ())
        check_loss_spec(self.output_loss_value_spec)
        check_loss_fn(self.loss_fn, self.output_loss_value_spec)
        check_loss_over(self.loss_over, self.loss_fn, self.loss_normalization)
        check_normalization(module, self.loss_normalization, self.count_items_fn, self.loss_function)
        arguments.check_gradient_reduction(self.gradient_reduction, self.loss_normalization)
        arguments.check_reference(self.check_against_module)
        check_grad_scaler(self.grad_scaler)
        arguments.check_floating_inputs(self.check_inputs)
        if self.input_names is not None:
            self.check_input_names(module, self.input_names)
        if self.shared_inputs is not None:
            of_forward = [name.partition("[")[0] for name in self.shared_inputs]
            check_names(module, self.of_module(module, of_forward), "shared_inputs")
        check_names(module, self.of_module(module, named_inputs(self.batch_dimension)), "batch_dimension")
        arguments.check_partition(self.partition, self._opened_batch(), self.partition_memory_limit, self.pipeline_cuts)
        if self.partition == "profiled" and (ranks := parallel_state.get_tensor_model_parallel_size()) > 1:
            # The layers of one rank would wait for the layers of the others.
            raise ValueError(
                f"partition='profiled' measures layers on one rank, and layers that are divided over {ranks} "
                f"tensor-parallel ranks do not run there alone. Use partition='balanced'."
            )
        if self.partition_batch is not None:
            self._check_names(module, list(self.partition_batch), "partition_batch")

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

    def of_module(self, module: nn.Module, names: Sequence[str]) -> list[str]:
        """Return the ``names`` of inputs, except the ones that go only to ``loss_fn``."""
        alone = () if self.loss_function is None else self.loss_function.names_alone(module)
        return [name for name in names if name not in alone]

    def check_input_names(self, module: nn.Module, names: Sequence[str]) -> None:
        """Raise ``ValueError`` unless ``names`` are names of inputs of ``module`` or ``loss_fn``, all that it needs."""
        self._check_names(module, names, "input_names")

    def _check_names(self, module: nn.Module, names: Sequence[str], argument: str) -> None:
        own = self.of_module(module, names)
        check_names(module, own, argument)
        check_required(module, own, argument)

    def choose_schedule(self, ranks: int) -> ChosenSchedule:
        """Return the schedule for ``ranks``. Raises ``ValueError`` for one that cannot run."""
        chosen = ChosenSchedule(self.schedule, ranks, self.num_microbatches, self.virtual_pipeline_size)
        if self.loss_over == "batch":
            check_forwards_first(chosen)
        return chosen

    def tracing_options(self, module: nn.Module) -> TracingOptions:
        """Return the options for tracing ``module``. Raises ``ValueError`` for a class that it does not have."""
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

    def partition_policy(self, module: nn.Module, schedule: ChosenSchedule) -> PartitionPolicy:
        """Return the policy that chooses the cuts of ``module``."""
        if self.pipeline_cuts is not None:
            return GivenCuts(self.pipeline_cuts)
        if not isinstance(self.partition, str):
            return self.partition
        batch = self._opened_batch()
        if self.partition == "even" or batch is None:
            return even
        limit, zero1 = self.partition_memory_limit, self.shares_optimizer_state
        return CostPolicy(module, batch, self.partition, schedule, limit, zero1)

    def _opened_batch(self) -> Any:
        """Return ``partition_batch`` with the values of each container as inputs of their own."""
        batch: Any = self.partition_batch
        if not isinstance(batch, Mapping):
            return batch
        opened = open_inputs(batch, all_kinds=True)
        return {name: value for name, value in opened.items() if not isinstance(value, InputDict)}


# ``dataclass`` writes the constructor.
PipelineConfig.__init__ = knows_its_keywords(PipelineConfig.__init__)  # type: ignore[method-assign]  # the same

"""NxDPPModel: NeuronX Distributed's names and arguments over ``Pipeline``."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, Generic, Literal, Protocol, Self, cast, overload
from weakref import ref

import torch
from torch import fx, nn

from nxdpp.gradients.average_checks import OptimizerCheck, check_optimizers
from nxdpp.gradients.grad_scaler import GradScaler
from nxdpp.pipeline import arguments
from nxdpp.pipeline.arguments import PostPartitionHook, call_hooks, checked_hooks
from nxdpp.pipeline.config import PipelineConfig
from nxdpp.pipeline.input_names import check_not_positional
from nxdpp.pipeline.loss.item_counts import CountItems
from nxdpp.pipeline.loss_returns import OnEveryRank, PerMicrobatch
from nxdpp.pipeline.manual_pipe_stage import StageOfLayers, manual_model
from nxdpp.pipeline.microbatches.batch_dimension import BatchDimension
from nxdpp.pipeline.microbatches.split_batch import SplitInputs
from nxdpp.pipeline.partition.partition import PartitionPolicy
from nxdpp.pipeline.pipeline import Pipeline
from nxdpp.pipeline.pipeline_view import PipelineView
from nxdpp.pipeline.stages.loss import LossSpec
from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults.board import board
from nxdpp.ranks.known_keywords import knows_its_keywords
from nxdpp.schedules.chosen import Written


class LayoutPlan(Protocol):
    """A plan of a job, such as ``nxdpp.plan`` returns."""

    def wrap(self, wrapper: Callable[..., Any], module: nn.Module, arguments: Mapping[str, Any]) -> Any:
        """Wrap ``module`` by ``wrapper``, a class of models, with the planned arguments and ``arguments``."""


class NxDPPModel(PipelineView, Generic[OnEveryRank, PerMicrobatch]):
    """A model that a pipeline of ranks trains, each of which holds some of its layers.

    Names, arguments and their meaning are as in NeuronX Distributed's ``NxDPPModel``. Every rank constructs it with
    the same model and arguments, after ``parallel_state.initialize_model_parallel``. Construction frees the parameters
    of other stages in ``module`` itself. After ``parallel_state.initialize_debug`` one process shows the part of one
    rank of a large job, and cannot run steps.

    Args:
        module: the model, with the same weights on every rank.
        transformer_layer_cls: class, or name of a class, of the layers, or a list of these. By default what Hugging
            Face models in it declare, otherwise the longest run of equal modules.
        num_microbatches: number of microbatches of a batch.
        virtual_pipeline_size: stages of each rank. 1 leaves the number to the ``schedule``.
        output_loss_value_spec: a dict, tuple or bool with ``True`` at the position of the loss. By default ``loss``.
        return_mb_loss: return a list with the loss of each microbatch, whose mean is the loss, in place of that mean.
        broadcast_and_average_loss: return the mean loss, over data-parallel ranks too, on every rank.
        pipeline_cuts: names of the layers, or of modules next to them (an embedding, a norm), after which to cut; one
            fewer than stages. By default an even split.
        input_names: names of the inputs of every step. By default any.
        leaf_module_cls: classes, or names of classes, of modules that are not traced through.
        autowrap_functions, autowrap_modules: functions, and modules of functions, that are not traced through. Either
            takes both.
        tracer_cls: ``"hf"`` (default) traces above layers only; ``"torch"``; or a ``torch.fx.Tracer`` class.
        param_init_fn: initialises each local module of a model on the meta device; see ``PipelineConfig``.
        trace_file_path: file for a Chrome trace of each step, complete after each step.
        use_zero1_optimizer: leave the average of gradients over data-parallel ranks to the optimizer. Its first step
            that changes parameters is collective over them, and raises ``RuntimeError`` if it has not averaged.
        auto_partition: split the layers evenly. Excludes ``pipeline_cuts``.
        deallocate_pipeline_outputs: free an activation after it is sent.
        check_against_module: ``"first"`` compares the first training step with the unwrapped module, for small models.
        partition: ``"even"``, ``"balanced"``, ``"profiled"``, or a function of the traced graph and the number of
            stages that returns ``pipeline_cuts``. ``"profiled"`` makes construction collective over all ranks.
        partition_batch: inputs of one microbatch with labels, for costs and the trace at construction. Meta tensors
            are allowed. Without it a trace that needs the shapes of inputs waits for the first step, or for ``trace``.
            Until then the layers are cut in an assumed order, and the step verifies it.
        partition_memory_limit: bytes of a rank for weights, gradients, AdamW's state and activations. With
            ``use_zero1_optimizer=True`` the replicas share the state.
        schedule: name of a family, path of a CSV file, or the actions of each rank. By default ``"1f1b"``.
        post_partition_hooks: functions of the wrapped model, called in order at the end of construction.
        split_inputs_fn: a function of the inputs and ``num_microbatches`` that returns the inputs of each microbatch.
        shared_inputs: names of inputs whose tensors go whole to each microbatch, such as a mask (T, T). See
            ``PipelineConfig`` for the tensors that are refused without it.
        batch_dimension: the dimension of inputs and outputs that has the rows, such as 1 for (T, B), or a dict by the
            names of inputs. By default 0; see ``PipelineConfig`` for the inputs that are a question then.
        loss_over: ``"microbatch"``, or ``"batch"`` to call ``loss_fn`` once, on the outputs of all microbatches, for
            losses that look at other rows (contrastive ones). For schedules with all forwards first: ``"gpipe"``.
        loss_normalization: ``"microbatch"``, the mean of the microbatches' losses, or ``"tokens"``, the mean over all
            labels of the batch, replicas included.
        count_items_fn: a function of a microbatch's inputs, for ``"tokens"``. It returns the number of items over which
            the model's loss is a mean. By default a transformers model gets ``num_items_in_batch``.
        grad_scaler: ``nxdpp.GradScaler``, which scales the loss for autocast to float16. Its ``step`` and ``update``
            follow ``run_train``.
        check_inputs: when the ranks of a pipeline compare floating inputs whole: ``"first"``, in the first step of each
            signature, and a sample of 64 elements in later ones, ``"always"`` or ``"never"``. They compare the values
            of other inputs in every step.
            With ``"never"`` no warning tells of data-parallel replicas that have the same batch.
        use_optimizer_wrapper: taken for NxD's scripts. ``run_train`` averages the gradients in any case, so a wrapper
            that averages them again changes nothing.
        fuse_microbatches: only ``False``.
        return_loss_on_cpu: return losses on the CPU. The host then waits for the device.
        loss_fn: a function ``loss_fn(output, labels)`` of the model's output and of inputs by name, such as
            ``nn.CrossEntropyLoss()``. It returns the loss of a microbatch. See ``PipelineConfig``.
        autowrap_obj_methods: refused; see ``leaf_module_cls``.
        manual_pp_partition: ``module`` is a list of layers, of which each gets the output of the one before. The first
            gets ``[inputs]``. A step takes ``inputs`` and ``labels``.
        manual_pp_stage_partition_fn: a function of the layers and the number of stages, which returns the stage of
            each layer. By default all stages have as many layers, and the last one has the remainder too.
        manual_pp_loss_fn: a function of the first value of the last layer's output, and of ``labels``.

    Raises ``ValueError`` or ``TypeError`` for an argument that cannot be honoured, before anything is changed. Raises
    ``TracingError`` for a model that cannot be traced, and ``RuntimeError`` before ``initialize_model_parallel``.
    """

    @knows_its_keywords
    def __init__(
        self,
        module: nn.Module | Sequence[nn.Module],
        transformer_layer_cls: Any | None = None,
        num_microbatches: int = 1,
        virtual_pipeline_size: int = 1,
        output_loss_value_spec: LossSpec = None,
        return_mb_loss: PerMicrobatch = False,  # type: ignore[assignment]  # solved by the default
        broadcast_and_average_loss: OnEveryRank = False,  # type: ignore[assignment]  # as above
        pipeline_cuts: Sequence[str] | None = None,
        input_names: Sequence[str] | None = None,
        leaf_module_cls: Sequence[Any] | None = None,
        autowrap_functions: Sequence[Callable[..., Any] | ModuleType] | None = None,
        autowrap_modules: Sequence[Callable[..., Any] | ModuleType] | None = None,
        tracer_cls: str | type[fx.Tracer] | None = None,
        param_init_fn: Any | None = None,
        trace_file_path: str | None = None,
        use_zero1_optimizer: bool = False,
        auto_partition: bool | None = False,
        deallocate_pipeline_outputs: bool = False,
        partition: str | PartitionPolicy = "even",
        partition_batch: Mapping[str, Any] | None = None,
        partition_memory_limit: int | None = None,
        schedule: Written | None = None,
        post_partition_hooks: Sequence[PostPartitionHook] | None = None,
        split_inputs_fn: SplitInputs | None = None,
        check_against_module: str | None = None,
        loss_normalization: str = "microbatch",
        count_items_fn: CountItems | None = None,
        grad_scaler: GradScaler | None = None,
        check_inputs: str = "first",
        use_optimizer_wrapper: bool = False,
        fuse_microbatches: bool = False,
        return_loss_on_cpu: bool = False,
        loss_fn: Callable[..., Any] | None = None,
        shared_inputs: Sequence[str] | None = None,
        autowrap_obj_methods: Mapping[Any, Sequence[str]] | None = None,
        manual_pp_partition: bool = False,
        manual_pp_stage_partition_fn: StageOfLayers | None = None,
        manual_pp_loss_fn: Callable[[Any, Any], Any] | None = None,
        batch_dimension: BatchDimension | None = None,
        loss_over: str = "microbatch",
    ) -> None:
        super().__init__()
        arguments.check_obj_methods(autowrap_obj_methods)
        arguments.check_manual(
            manual_pp_partition,
            {"manual_pp_stage_partition_fn": manual_pp_stage_partition_fn, "manual_pp_loss_fn": manual_pp_loss_fn},
            {"transformer_layer_cls": transformer_layer_cls, "pipeline_cuts": pipeline_cuts, "loss_fn": loss_fn},
        )
        if manual_pp_partition:
            module, transformer_layer_cls, pipeline_cuts, loss_fn = manual_model(
                module, virtual_pipeline_size, manual_pp_stage_partition_fn, manual_pp_loss_fn
            )
        # Pipeline refuses what is no module.
        root = cast(nn.Module, module)
        if auto_partition and pipeline_cuts is not None and not len(pipeline_cuts):
            pipeline_cuts = None
        config = PipelineConfig(
            num_microbatches=num_microbatches,
            virtual_pipeline_size=virtual_pipeline_size,
            schedule=schedule,
            transformer_layer_cls=transformer_layer_cls,
            pipeline_cuts=pipeline_cuts,
            partition=partition,
            partition_batch=partition_batch,
            partition_memory_limit=partition_memory_limit,
            shares_optimizer_state=use_zero1_optimizer,
            input_names=input_names,
            split_inputs_fn=split_inputs_fn,
            shared_inputs=shared_inputs,
            batch_dimension=batch_dimension,
            output_loss_value_spec=output_loss_value_spec,
            loss_fn=loss_fn,
            loss_over=loss_over,
            loss_normalization=loss_normalization,
            count_items_fn=count_items_fn,
            leaf_module_cls=leaf_module_cls,
            autowrap_functions=autowrap_functions,
            autowrap_modules=autowrap_modules,
            tracer_cls=tracer_cls,
            param_init_fn=param_init_fn,
            trace_file_path=trace_file_path,
            deallocate_pipeline_outputs=deallocate_pipeline_outputs,
            check_against_module=check_against_module,
            grad_scaler=grad_scaler,
            check_inputs=check_inputs,
        )
        hooks = checked_hooks(post_partition_hooks)
        arguments.check_loss_returns(return_mb_loss, broadcast_and_average_loss, loss_over)
        arguments.check_scripts_arguments(use_optimizer_wrapper, fuse_microbatches, return_loss_on_cpu)
        arguments.check_auto_partition(auto_partition, pipeline_cuts, partition)
        self._pipeline = Pipeline(
            root,
            config,
            {"broadcast_and_average_loss": broadcast_and_average_loss, "use_zero1_optimizer": use_zero1_optimizer},
        )
        self.rank = self._pipeline.rank
        self.stages = self._pipeline.partition.stages
        self.local_stages = self._pipeline.local_stages
        self.holds_last_stage = self._pipeline.holds_last_stage
        others = self._pipeline.cut_modules
        self.layers = [name for name in self._pipeline.partition.layers if name not in others]
        self.pipeline_cuts = list(self._pipeline.partition.cuts)
        of_stages = self._pipeline.partition.layers_of(self.local_stages)
        self.stage_layers = [name for name in of_stages if name not in others]
        # Names, in the whole model, of each parameter and each buffer that has several.
        self.tied_names = self._pipeline.tied_names
        self._num_microbatches = config.num_microbatches
        self.return_mb_loss: bool = return_mb_loss
        self.broadcast_and_average_loss: bool = broadcast_and_average_loss
        self.input_names = None if input_names is None else list(input_names)
        self.use_zero1_optimizer = use_zero1_optimizer
        self.deallocate_pipeline_outputs = deallocate_pipeline_outputs
        self.return_loss_on_cpu = return_loss_on_cpu
        # Attributes that NxD's scripts read.
        self.pipeline_parallel_rank = self.rank
        self.pipeline_parallel_size = parallel_state.get_pipeline_model_parallel_size()
        self.virtual_pipeline_size = len(self.local_stages)
        classes = self._pipeline.layer_classes
        self.transformer_layer_cls = classes[0] if len(classes) == 1 else classes
        self.partitioned = True
        self._optimizer_check: OptimizerCheck | None = None
        # The whole model is no submodule: this rank holds only a part of it.
        self.__dict__["original_module"] = root
        self.local_module = self._pipeline.local_module
        self.training = root.training
        with board.construction():
            call_hooks(hooks, self, self.rank)
        self._pipeline.follow()

    @overload
    @classmethod
    def from_plan(
        cls, module: nn.Module, plan: LayoutPlan, *, broadcast_and_average_loss: Literal[True], **arguments: Any
    ) -> "NxDPPModel[Literal[True]]": ...
    @overload
    @classmethod
    def from_plan(
        cls, module: nn.Module, plan: LayoutPlan, *, return_mb_loss: Literal[True], **arguments: Any
    ) -> "NxDPPModel[Literal[False], Literal[True]]": ...
    @overload
    @classmethod
    def from_plan(cls, module: nn.Module, plan: LayoutPlan, **arguments: Any) -> Self: ...
    @classmethod
    def from_plan(cls, module: nn.Module, plan: LayoutPlan, **arguments: Any) -> Any:
        """Wrap ``module`` for the first layout of ``plan`` (``nxdpp.plan``), after ``plan.initialize()``.

        It divides ``module`` over the tensor group (``tensor_parallelize``), wraps it with ``plan.arguments()``, and
        checkpoints and shards its layers where the layout does (``apply_checkpoint``, ``fully_shard``). With ZeRO-1 the
        optimizer is ``Zero1Optimizer``, as for ``use_zero1_optimizer=True``. ``arguments`` are further arguments of
        ``NxDPPModel``.

        Raises:
            ValueError: for ``arguments`` that a plan chooses, and for other sizes, another class or another dtype of
                the model than the plan's. Nothing is changed then. Also as ``NxDPPModel`` and ``tensor_parallelize``.
        """
        return plan.wrap(cls, module, arguments)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which ``run_train`` does not average gradients over data-parallel replicas.

        Gradients add up on each replica, and the next ``run_train`` outside averages their sum::

            with model.no_sync():
                model.run_train(**first)
            model.run_train(**second)

        Every rank enters it for the same steps. ``use_zero1_optimizer=True`` leaves out all averages anyway.
        """
        return self._pipeline.no_sync()

    def trace(self, *positional: Any, **inputs: Any) -> None:
        """Trace for ``inputs`` of a step, as ``run_train`` takes them, and verify the stages with the graph.

        Not collective; no tensor is computed or sent. Tensors on the meta device are allowed, and so is a model on the
        meta device. The first ``run_train`` or ``run_eval`` does the same: ``trace`` finds an error earlier. Raises
        ``ValueError``, ``TypeError`` and ``TracingError`` as ``run_train`` does.

        ``trace(input_names=[...])`` is NeuronX Distributed's: steps take exactly these inputs from then on.
        """
        if inputs.get("input_names") is not None:
            self.input_names = list(arguments.input_names_of_trace(inputs))
            self._pipeline.expect_inputs(self.input_names)
            return
        check_not_positional(self.original_module, positional)
        self._pipeline.trace(inputs)

    @overload
    def run_train(self: "NxDPPModel[Literal[True], Literal[True]]", *positional: Any, **inputs: Any) -> Any: ...
    @overload
    def run_train(self: "NxDPPModel[Literal[False]]", *positional: Any, **inputs: Any) -> torch.Tensor | None: ...
    @overload
    def run_train(self: "NxDPPModel[Literal[True], Any]", *positional: Any, **inputs: Any) -> torch.Tensor: ...
    @overload
    def run_train(
        self: "NxDPPModel[Any, Literal[True]]", *positional: Any, **inputs: Any
    ) -> list[torch.Tensor] | None: ...
    @overload
    def run_train(self: "NxDPPModel[bool]", *positional: Any, **inputs: Any) -> torch.Tensor | None: ...
    @overload
    def run_train(self, *positional: Any, **inputs: Any) -> torch.Tensor | list[torch.Tensor] | None: ...
    def run_train(self, *positional: Any, **inputs: Any) -> torch.Tensor | list[torch.Tensor] | None:
        """Run forward and backward of all microbatches; collective over all ranks.

        Gradients of the loss (``loss_normalization``) are added to ``.grad`` and averaged over data-parallel replicas,
        except in ``no_sync()``.
        Takes ``inputs`` by name, and raises, as ``Pipeline.train_step`` does. ``num_items_in_batch`` is the number of
        all replicas; the loss is then the sum of what the model returns.

        Returns the detached mean of the microbatches' losses on the rank of the last stage (``holds_last_stage``), and
        ``None`` on others. ``return_mb_loss`` and ``broadcast_and_average_loss`` change that, and type checkers follow
        them: ``NxDPPModel[Literal[True]]`` annotates a model that returns its loss on every rank.
        """
        with board.call("run_train", "step", "pipeline", has_limit=True):
            if positional:
                check_not_positional(self.original_module, positional)
            losses = self._pipeline.train_batch(inputs, not self.use_zero1_optimizer)
            return self._trained(losses)

    def run_train_microbatches(
        self, microbatches: Sequence[Mapping[str, Any]]
    ) -> torch.Tensor | list[torch.Tensor] | None:
        """Run forward and backward of ``microbatches`` as they are; collective over all ranks.

        ``microbatches`` are the model's inputs by name of each, equal on all ranks of the pipeline. Their number may
        differ from ``num_microbatches``, from step to step and between replicas, and each may have rows, lengths and
        optional inputs of its own. Nothing is split. Each new number or mix makes its first step longer. Gradients, the
        returned loss and the errors are those of ``run_train``. Replicas weigh the same in the mean of
        ``loss_normalization="microbatch"``, whatever their numbers of microbatches; ``"tokens"`` weighs labels.
        """
        with board.call("run_train_microbatches", "step", "pipeline", has_limit=True):
            return self._trained(self._pipeline.train_given(microbatches, not self.use_zero1_optimizer))

    def run_eval(self, *positional: Any, everywhere: bool | Any = False, **inputs: Any) -> Any:
        """Run the forward of all microbatches without gradients; collective over all ranks.

        Takes inputs as ``run_train`` does, of any number of rows, and returns the loss as it does if the output names
        one or is one tensor of shape (). Otherwise the rank of the last stage returns the model's output. With
        ``everywhere=True`` every rank of the pipeline returns the loss or the output; all ranks must give it.

        The output has the values of all microbatches. Tensors with a value for each row are concatenated along
        dimension 0 or ``batch_dimension``, and scalars are stacked. Other values are returned once where they are equal
        in all microbatches, concatenated where they have a value for each position of an input (B * T, ...), and else
        a list of one value for each microbatch. Rows that do not divide into ``num_microbatches`` make microbatches of
        different sizes, whose means weigh as their rows.

        Raises as ``run_train`` does, and ``TypeError`` for an ``everywhere`` that is no ``bool``.
        """
        if not isinstance(everywhere, bool):
            raise TypeError(
                f"everywhere={everywhere!r:.80} must be True or False. A model's own input of this name cannot be "
                f"given to run_eval: rename it in forward."
            )
        with board.call("run_eval", "step", "pipeline", has_limit=True):
            check_not_positional(self.original_module, positional)
            evaluation = self._pipeline.evaluate_batch(inputs, everywhere)
            if evaluation.losses is None:
                return evaluation.output
            return self._return_loss(evaluation.losses, train=False, everywhere=everywhere)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients of the whole model so that their norm is ``max_norm`` at most; return the norm before.

        Collective over all ranks, between ``run_train`` and the optimizer's step. ``norm_type`` is the order of the
        norm, above 0 or infinity. The norm is a tensor without dimensions, equal on all ranks: float64 if the model has
        gradients in float64, and float32 otherwise. It equals, to rounding, what ``torch.nn.utils.clip_grad_norm_``
        returns for the unwrapped model. On a wrapped model torch's function would see only this rank's gradients.

        Raises:
            ValueError: for a ``max_norm`` or ``norm_type`` that is not above 0, and for sparse gradients.
            RuntimeError: with ``use_zero1_optimizer=True`` and several replicas: the gradients are averaged later. Also
                before ``grad_scaler.unscale_``, and in the debug mode.
        """
        if self.use_zero1_optimizer and parallel_state.get_data_parallel_size() > 1:
            raise RuntimeError(
                "use_zero1_optimizer=True leaves the average of gradients over replicas to the optimizer, so they "
                "cannot be clipped before its step. Have the optimizer clip them after the average, or set "
                "use_zero1_optimizer=False."
            )
        return self._pipeline.clip_grad_norm(max_norm, norm_type)

    def _trained(self, losses: list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor] | None:
        if self._optimizer_check is None and not self._pipeline.is_averaged:
            parameters = dict(self.local_named_parameters())
            self._optimizer_check = check_optimizers(parameters, self.use_zero1_optimizer, ref(self._pipeline))
        return self._return_loss(losses, train=True)

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches of ``run_train``; it is set once, by the constructor."""
        return self._num_microbatches

    @num_microbatches.setter
    def num_microbatches(self, number: int) -> None:
        raise AttributeError(
            f"num_microbatches={number} comes after the model was wrapped with {self._num_microbatches}. Give the "
            f"microbatches of a step to run_train_microbatches([...]), any number of them; or wrap with "
            f"num_microbatches={number}."
        )

    def _return_loss(
        self, losses: list[torch.Tensor], train: bool, everywhere: bool = False
    ) -> torch.Tensor | list[torch.Tensor] | None:
        if not self.holds_last_stage and not self.broadcast_and_average_loss and not everywhere:
            return None
        if self.return_mb_loss:
            return [loss.cpu() for loss in losses] if self.return_loss_on_cpu else losses
        is_mean = self.broadcast_and_average_loss
        loss = self._pipeline.mean_loss(losses, train) if is_mean else torch.stack(losses).mean()
        return loss.cpu() if self.return_loss_on_cpu else loss


# Type parameters to type checkers, and plain booleans to a reader of ``help``.
NxDPPModel.__init__.__annotations__ |= {"return_mb_loss": bool, "broadcast_and_average_loss": bool}

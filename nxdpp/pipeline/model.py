"""NxDPPModel: a model cut into stages, of which this rank holds and trains its own; NeuronX Distributed's names.

::

    module ─ trace ─▶ graph ─ first_partition ─▶ Partition ─┬─▶ ProgramCache   a program for each spec of inputs
                                                            ├─▶ Part           this rank's parameters; others are freed
                                                            └─▶ Steps          prepare, verify, run, finish a step
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, Self, overload
from weakref import ref

import torch
from torch import nn

from nxdpp.agreement.exchange import ReplicaExchanges
from nxdpp.gradients.average_checks import check_optimizers

# ``import nxdpp`` takes it from here.
from nxdpp.gradients.expert_parameters import is_of_experts
from nxdpp.gradients.grad_scaler import GradScaler as GradScaler
from nxdpp.gradients.overlapped_average import AverageReport
from nxdpp.ground.torch_names import MOVE
from nxdpp.pipeline import activation_checkpoint, arguments
from nxdpp.pipeline.arguments import call_hooks
from nxdpp.pipeline.config import OnEveryRank, PerMicrobatch, PipelineConfig, Settings
from nxdpp.pipeline.first_partition import first_partition
from nxdpp.pipeline.input_names import check_not_positional
from nxdpp.pipeline.local.changes import ChangeRecord
from nxdpp.pipeline.local.loading import works_on_meta
from nxdpp.pipeline.local.local_module import stage_module
from nxdpp.pipeline.local.own_save import save_directory_of
from nxdpp.pipeline.local.part import Part
from nxdpp.pipeline.local.refused_models import refuse_grouped_experts, refuse_lost_ties, refuse_other_wrappers
from nxdpp.pipeline.local.spine_hooks import warn_of_traced_hooks
from nxdpp.pipeline.local.tree import follow_training_modes
from nxdpp.pipeline.local.view import LocalView
from nxdpp.pipeline.local.wrapped_methods import UnlessWrapped
from nxdpp.pipeline.loss.normalization import LossNormalization
from nxdpp.pipeline.stages.program_cache import ProgramCache
from nxdpp.pipeline.steps import Steps
from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults import failure_watch
from nxdpp.ranks.faults.board import board
from nxdpp.ranks.known_keywords import knows_its_keywords
from nxdpp.tensor.move_model_to_device import checked_device


class LayoutPlan(Protocol):
    """A plan of a job, such as ``nxdpp.plan`` returns."""

    def wrap(self, wrapper: Callable[..., Any], module: nn.Module, arguments: Mapping[str, Any]) -> Any:
        """Wrap ``module`` by ``wrapper``, a class of models, with the planned arguments and ``arguments``."""


if TYPE_CHECKING:
    # To type checkers the constructor is that of the settings, whose names, types and defaults are written once.
    _Constructor = Settings
else:

    class _Constructor(Generic[OnEveryRank, PerMicrobatch]):
        pass


# ``help`` shows the settings with their types; the two type parameters are plain booleans to its reader.
_FLAGS = ("return_mb_loss", "broadcast_and_average_loss")
# Settings that scripts read.
_SHOWN = (*_FLAGS, "use_zero1_optimizer", "deallocate_pipeline_outputs", "return_loss_on_cpu")
_SIGNATURE = Signature(
    [
        Parameter("self", Parameter.POSITIONAL_OR_KEYWORD),
        *(
            each.replace(annotation=bool) if each.name in _FLAGS else each
            for each in signature(Settings).parameters.values()
        ),
    ]
)


class NxDPPModel(_Constructor[OnEveryRank, PerMicrobatch], LocalView):
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
        param_init_fn: initialises a model on the meta device: a function of a module, or of a module and a device. It
            initialises the parameters and buffers of this module itself. Random numbers of torch's default generator do
            not depend on the partition; numbers of another generator may. By default ``_init_weights`` of transformers'
            models, or ``reset_parameters``.
        trace_file_path: file for a Chrome trace of each step, complete after each step. Replicas other than the first
            write next to it (``trace.pipeline1.json``). An existing file is replaced. Ranks then end a step together.
        use_zero1_optimizer: leave the average of gradients over data-parallel ranks to the optimizer. Its first step
            that changes parameters is collective over them, and raises ``RuntimeError`` if it has not averaged.
        auto_partition: split the layers evenly. Excludes ``pipeline_cuts``.
        deallocate_pipeline_outputs: free an activation after it is sent. Its place in the autograd graph is kept.
        check_against_module: ``"first"`` compares losses and gradients of the first training step with the unwrapped
            module's, for small models: every rank holds and runs the whole model once. A difference is a
            ``RuntimeError``.
        partition: ``"even"``, ``"balanced"``, ``"profiled"``, or a function of the traced graph and the number of
            stages that returns ``pipeline_cuts``. ``"profiled"`` makes construction collective over all ranks.
        partition_batch: inputs of one microbatch with labels, for costs and the trace at construction. Meta tensors
            are allowed. Without it a trace that needs the shapes of inputs waits for the first step, or for ``trace``.
            Until then the layers are cut in an assumed order, and the step verifies it.
        partition_memory_limit: bytes of a rank for weights, gradients, AdamW's state and activations. With
            ``use_zero1_optimizer=True`` the replicas share the state.
        schedule: name of a family, path of a CSV file, or the actions of each rank. By default ``"1f1b"``, and
            ``"interleaved"`` for several stages of a rank.
        post_partition_hooks: functions of the wrapped model, called in order at the end of construction.
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
        loss_over: ``"microbatch"``, or ``"batch"`` to call ``loss_fn`` once a step, on the outputs and inputs of all
            microbatches, for losses that look at other rows (contrastive ones). Replicas have losses of their own. For
            schedules with all forwards of the last stage first, such as ``"gpipe"``.
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
            ``nn.CrossEntropyLoss()``. It returns the loss of a microbatch, a tensor of one element, and runs on the
            last stage, as a single node. An input for which ``forward`` has no parameter goes to it alone. By default
            the output has the loss.
        autowrap_obj_methods: refused; see ``leaf_module_cls``.
        manual_pp_partition: ``module`` is a list of layers, of which each gets the output of the one before. The first
            gets ``[inputs]``. A step takes ``inputs`` and ``labels``.
        manual_pp_stage_partition_fn: a function of the layers and the number of stages, which returns the stage of
            each layer. By default all stages have as many layers, and the last one has the remainder too.
        manual_pp_loss_fn: a function of the first value of the last layer's output, and of ``labels``.
        gradient_reduction: ``"mean"``, gradients of the mean loss over microbatches and replicas, or ``"sum"``,
            gradients of the sum of all losses. The losses that a step returns are the same.

    Raises ``ValueError`` or ``TypeError`` for an argument that cannot be honoured, before anything is changed. Raises
    ``TracingError`` for a model that cannot be traced, and ``RuntimeError`` before ``initialize_model_parallel``.
    """

    original_module: nn.Module
    rank: int
    layers: list[str]
    stage_layers: list[str]
    # The chosen ones.
    pipeline_cuts: list[str]
    part: Part
    steps: Steps

    if not TYPE_CHECKING:

        def __init__(self, *positional: Any, **named: Any) -> None:
            super().__init__()
            # An error about the arguments names them, and not the class that keeps them.
            _SIGNATURE.bind(self, *positional, **named)
            config = PipelineConfig(*positional, **named)
            config.resolve()
            with board.construction():
                self._build(config)
                call_hooks(config.post_partition_hooks or (), self, self.rank)
            self.part.follow()

    def _build(self, config: PipelineConfig) -> None:
        """Trace and cut the model; free the parameters of other stages; make what runs a step."""
        config.check()
        module = config.root
        refuse_other_wrappers(module)
        refuse_grouped_experts(module, parallel_state.local_device())
        refuse_lost_ties(module)
        schedule = config.choose_schedule(parallel_state.get_pipeline_model_parallel_size())
        options = config.tracing_options()
        names = None if config.input_names is None else config.of_module(config.input_names)
        policy, stages = config.partition_policy(schedule), schedule.placement.stages
        partition = first_partition(module, options, stages, policy, names, config.partition_batch)
        number = board.pipelines + 1
        exchanges = ReplicaExchanges(config.agreed_by_replicas(number))
        normalization = LossNormalization(module, config, exchanges)
        normalization.check_example(partition, options)
        warn_of_traced_hooks(module, partition.layers)
        arguments.warn_of_own_listings(module)
        arguments.warn_of_idle_ranks(schedule)
        self.rank = parallel_state.get_pipeline_model_parallel_rank()
        self.local_stages = schedule.placement.stages_of(self.rank)
        changes = ChangeRecord()
        agreed = config.agreed_by_ranks(number, schedule, partition)
        programs = ProgramCache(partition, options, config.output_loss_value_spec, self.local_stages, agreed, changes)
        # From here on the parameters of other stages are freed.
        owners = {name: set(map(schedule.placement.rank_of, held)) for name, held in partition.owners.items()}
        self.part = Part(module, owners, self.rank, partition.layers, config.param_init_fn, changes, partition.owners)
        self.steps = Steps(config, partition, schedule, self.part, programs, normalization, exchanges)
        self.local_module = self.part.module
        self._show(config, options.layer_classes, options.cut_modules)
        self._checks_optimizers = False
        # The whole model is no submodule: this rank holds only a part of it.
        self.__dict__["original_module"] = module
        if self.part.initial.is_made_at_once:
            self.part.materialise()
        board.pipelines = number

    def _show(self, config: PipelineConfig, classes: Sequence[type[nn.Module]], cut_modules: Sequence[str]) -> None:
        """Set the attributes that scripts read."""
        partition = self.steps.partition
        self.stages = partition.stages
        self.holds_last_stage = partition.stages - 1 in self.local_stages
        self.layers = [name for name in partition.layers if name not in cut_modules]
        self.pipeline_cuts = list(partition.cuts)
        self.stage_layers = [name for name in partition.layers_of(self.local_stages) if name not in cut_modules]
        # Names, in the whole model, of each parameter and each buffer that has several.
        self.tied_names = self.part.aliases
        self._num_microbatches = config.num_microbatches
        self.input_names = None if config.input_names is None else list(config.input_names)
        for name in _SHOWN:
            setattr(self, name, getattr(config, name))
        self.pipeline_parallel_rank = self.rank
        self.pipeline_parallel_size = parallel_state.get_pipeline_model_parallel_size()
        self.virtual_pipeline_size = len(self.local_stages)
        self.transformer_layer_cls = classes[0] if len(classes) == 1 else classes
        self.partitioned = True
        self.training = config.root.training

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
        return self.steps.replicas.no_sync()

    def trace(self, *positional: Any, **inputs: Any) -> None:
        """Trace for ``inputs`` of a step, as ``run_train`` takes them, and verify the stages with the graph.

        Not collective; no tensor is computed or sent. Tensors on the meta device are allowed, and so is a model on the
        meta device. The first ``run_train`` or ``run_eval`` does the same: ``trace`` finds an error earlier. Raises
        ``ValueError``, ``TypeError`` and ``TracingError`` as ``run_train`` does.

        ``trace(input_names=[...])`` is NeuronX Distributed's: steps take exactly these inputs from then on.
        """
        if inputs.get("input_names") is not None:
            self.input_names = list(arguments.input_names_of_trace(inputs))
            self.steps.expect_inputs(self.input_names)
            return
        check_not_positional(self.original_module, positional)
        self.steps.trace(inputs)

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
        ``num_items_in_batch`` is the number of all replicas; the loss is then the sum of what the model returns. The
        first step compares the replicas' parameters.

        Args:
            positional: refused, with the names.
            inputs: the model's inputs by name, equal on all ranks of the pipeline. Tensors ``(B, ...)`` are split along
                dimension 0 or ``batch_dimension``, or by ``split_inputs_fn``; so are tensors in dicts among the inputs.
                ``shared_inputs``, tensors of first dimension 1 next to larger ones, and other values go whole to each
                microbatch. Images of a transformers model go with their rows.

        Returns the detached mean of the microbatches' losses on the rank of the last stage (``holds_last_stage``), and
        ``None`` on others. ``return_mb_loss`` and ``broadcast_and_average_loss`` change that, and type checkers follow
        them: ``NxDPPModel[Literal[True]]`` annotates a model that returns its loss on every rank.

        Raises:
            ValueError, TypeError: for inputs that cannot be used, such as a microbatch without labels, before anything
                is sent to another stage.
            TracingError: for inputs with which the model cannot be traced.
            RuntimeError: without gradients (``torch.no_grad()``), under autocast to float16 without a ``grad_scaler``,
                for trained parameters in float16, and for a step that fails. A failure ends all ranks.
        """
        with board.call("run_train", "step", "pipeline", has_limit=True):
            if positional:
                check_not_positional(self.original_module, positional)
            return self._return_loss(self.steps.train(inputs, not self.use_zero1_optimizer))

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
            return self._return_loss(self.steps.train(microbatches, not self.use_zero1_optimizer, are_parts=True))

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
            losses, output = self.steps.evaluate(inputs, everywhere)
            return output if losses is None else self._return_loss(losses, train=False, everywhere=everywhere)

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
        if self.use_zero1_optimizer and parallel_state.get_replica_size() > 1:
            raise RuntimeError(
                "use_zero1_optimizer=True leaves the average of gradients over replicas to the optimizer, so they "
                "cannot be clipped before its step. Have the optimizer clip them after the average, or set "
                "use_zero1_optimizer=False."
            )
        return self.steps.clip_grad_norm(max_norm, norm_type)

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
        self, losses: list[torch.Tensor], train: bool = True, everywhere: bool = False
    ) -> torch.Tensor | list[torch.Tensor] | None:
        if train and not self._checks_optimizers and not self.steps.replicas.is_averaged:
            self._checks_optimizers = True
            check_optimizers(dict(self.local_named_parameters()), self.use_zero1_optimizer, ref(self.steps.replicas))
        if not self.holds_last_stage and not self.broadcast_and_average_loss and not everywhere:
            return None
        if self.return_mb_loss:
            return [loss.cpu() for loss in losses] if self.return_loss_on_cpu else losses
        is_mean = self.broadcast_and_average_loss
        loss = self.steps.mean_loss(losses, train) if is_mean else torch.stack(losses).mean()
        return loss.cpu() if self.return_loss_on_cpu else loss

    @property
    def last_average(self) -> AverageReport:
        """Figures of the average of gradients in the last step: bytes sent, those sent early, and the wait for them."""
        return self.steps.replicas.report

    @property
    def original_torch_module(self) -> nn.Module:
        """The wrapped module, ``original_module``."""
        return self.original_module

    @property
    def local_stage_modules(self) -> list[nn.Module]:
        """The modules of each of this rank's stages, under their original names, in the order of the model."""
        if len(self.local_stages) == 1:
            return [self.local_module]
        partition = self.steps.partition
        stages = [set(partition.parameters_of(stage)) for stage in self.local_stages]
        return [stage_module(self.local_module, names, partition.owners) for names in stages]

    @property
    def schedule_name(self) -> str:
        """Name of the schedule, such as ``1f1b``."""
        return self.steps.schedule.name

    @property
    def last_busy_share(self) -> float:
        """Share of the last step, between 0 and 1, in which this rank computed."""
        return 0.0 if self.steps.timer is None else self.steps.timer.busy_share

    @property
    def last_step_seconds(self) -> float:
        """Seconds of the last step on this rank's device, from its first action to its last message.

        The average over data-parallel replicas that follows is not in it.
        """
        return 0.0 if self.steps.timer is None else self.steps.timer.seconds

    @property
    def last_action_seconds(self) -> dict[str, float]:
        """Seconds of each compute action of this rank in the last step, in order, by its text.

        ``2F0`` is the forward of microbatch 0 in stage 2; ``B`` is a backward, ``I`` an input-gradient and ``W`` a
        weight-gradient. Empty on XLA, which runs the operations of an action later.
        """
        return {text: 1e-9 * (end - start) for text, start, end in self.last_action_times}

    @property
    def last_action_times(self) -> list[tuple[str, int, int]]:
        """Text, start and end of each compute action of this rank in the last step; ``last_action_seconds`` has texts.

        Times are nanoseconds of ``time.perf_counter_ns``. A CUDA device is waited for.
        """
        return [] if self.steps.timer is None else self.steps.timer.action_times

    @property
    def last_expert_balance(self) -> dict[str, Any]:
        """Tokens that came to the experts of this rank in the last training step, for JSON; not collective.

        A token counts once for each expert that it chooses. ``"experts"`` are the tokens of each expert, summed over
        the layers of this rank, with 0 for experts of other ranks. ``"routing"`` has ``"largest_over_mean"``, the most
        tokens of an expert of this rank over the mean of the experts of its layer, ``"largest"``, that layer and
        expert, and ``"share"``, the part of all tokens that came to this rank. Empty without ``expert_parallelize``.
        """
        return self.steps.participants.told()

    @property
    def last_compile_seconds(self) -> float:
        """Seconds of compilations of an XLA device, from the end of the step before to the end of the last step.

        They include the graph of an optimizer's step. 0.0 on other devices, with ``apply_compile`` too.
        """
        return self.steps.compile_seconds

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], is_main_process: bool = True, *positional: Any, **arguments: Any
    ) -> None:
        """Write the model in the format of transformers, as ``nxdpp.save_pretrained``; collective over all ranks.

        ``arguments`` are transformers' arguments. Raises ``ValueError`` for values that are not their defaults, for
        ``positional`` ones after ``is_main_process``, and as ``nxdpp.save_pretrained`` does. Every rank calls it, and
        one rank writes each tensor, whatever ``is_main_process`` is.
        """
        save_directory_of(self, save_directory, positional, arguments)

    def generate(self, *positional: Any, num_microbatches: int = 1, **arguments: Any) -> Any:
        """Generate tokens as ``generate`` of transformers; collective over the ranks of a pipeline.

        The tokens equal one process's: the driver, a rank of the last stage, runs transformers' own ``generate``, and
        all ranks run its forwards, each with the cache of its own layers. Logits stay on the driver, and tokens go to
        all. Several batches keep all stages busy. The training mode stays as it is: call ``eval()`` before. A
        ``generate`` that the model's class has written itself runs on every rank with its own arguments, and each of
        its forwards is an evaluation whose output all ranks get.

        Args:
            positional: tokens (B, T), or what the model's ``generate`` takes; also by name (``input_ids``). A list of
                dicts of inputs is for several batches. Further ones as for the model's ``generate``.
            num_microbatches: equal parts into which the rows are split; several are generated at a time. Parts and
                batches that sample have seeds of their own, ``torch.randint(2**63 - 1, (n,))`` of the generator.
            arguments: of transformers' ``generate``: masks, ``generation_config`` and its fields, ``logits_processor``,
                ``stopping_criteria``, ``streamer``, ``synced_gpus`` (over data-parallel replicas) and others.
                Processors and criteria run on the driver, a streamer where it is given.

        Returns:
            The tokens (B, T + new) on every rank, for a list of batches a list. With ``return_dict_in_generate=True``
            the output of transformers without its cache; only the driver has scores and logits.

        Raises:
            ValueError, TypeError: for arguments that cannot be honoured, with the reason: caches and outputs of
                other ranks' layers, and an assistant. Also what transformers raises, on all ranks. ``ValueError`` for
                experts that ``expert_parallelize`` has divided.
            RuntimeError: for a model whose code above the layers needs values of another rank. The job ends.
        """
        from nxdpp.generation.generate import generate

        if any(map(is_of_experts, self.original_module.parameters())):
            raise ValueError(
                f"expert_parallelize has divided the experts over "
                f"{parallel_state.get_expert_model_parallel_size()} ranks, whose replicas would wait for each other's "
                f"tokens in each forward of generate: save_pretrained(model, directory), and generate with "
                f"expert_model_parallel_size=1."
            )
        if (ranks := parallel_state.get_context_model_parallel_size()) > 1:
            raise ValueError(
                f"context_parallelize has divided sequences over {ranks} ranks, which generate does not: "
                f"save_pretrained(model, directory), and generate with context_parallel_size=1."
            )
        return generate(self, positional, num_microbatches, arguments)

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: Mapping[str, Any] | None = None, **arguments: Any
    ) -> None:
        """Recompute the forward of each layer in its backward, as ``nxdpp.apply_checkpoint``; not collective.

        Every rank calls it. Layers that transformers recomputes stay as they are. Raises ``ValueError`` for
        ``gradient_checkpointing_kwargs`` other than ``use_reentrant=False`` and ``preserve_rng_state=True``, and for
        ``arguments``.
        """
        activation_checkpoint.enable_checkpointing(self, gradient_checkpointing_kwargs, arguments)

    def gradient_checkpointing_disable(self) -> None:
        """Keep the activations of this rank's layers; not collective. Every rank calls it."""
        activation_checkpoint.disable_checkpointing(self)

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: Mapping[str, Any] | None = None, **arguments: Any
    ) -> None:
        """The same as ``gradient_checkpointing_enable``, by its later name in transformers."""
        activation_checkpoint.enable_checkpointing(self, activation_checkpointing_kwargs, arguments)

    @property
    def is_gradient_checkpointing(self) -> bool:
        """``True`` if this rank recomputes a layer in the backward."""
        return any(activation_checkpoint.is_recomputed(module) for module in self.local_modules())

    # Their later names in transformers.
    activation_checkpointing_disable = gradient_checkpointing_disable
    is_activation_checkpointing = is_gradient_checkpointing

    def materialise(self) -> None:
        """Give initial weights to this rank's tensors on the meta device; not collective.

        Tensors with values stay as they are. Random numbers follow from torch's seed at the time of wrapping and from
        the parameter's name. So any partition gives the same model. Construction calls it for a model of
        ``deferred_init`` or with a ``param_init_fn``. Raises ``RuntimeError`` for tensors that nothing initialises,
        before anything is changed.
        """
        self.part.materialise()

    def move_model_to_device(self, device: torch.device | str | int | None = None) -> None:
        """Move this rank's parameters and buffers, by default to its CUDA device under NCCL, to the CPU under gloo.

        Collective over all ranks. Materialises the model first. Copies of a weight that several ranks hold get the
        values of its first owner. Attributes, gradients and ``requires_grad`` are kept. Make the optimizer after it.

        Raises:
            ValueError: for a missing device and for the meta device, before anything is changed.
            RuntimeError: for an optimizer that holds parameters to be replaced and for copies of a weight with other
                shapes or dtypes. Also for data-parallel replicas with other values, by a sample of each parameter.
        """
        target = checked_device(parallel_state.local_device() if device is None else device)
        if target.type == "meta":
            raise ValueError("the meta device has no memory, and a move to it loses all values: give another device.")
        failure_watch.refuse_after_failure()
        with board.call("move_model_to_device"):
            self.part.move_to(target, self.steps.engines.transport)

    @UnlessWrapped
    def cut_pipeline_stage(self, cut_point: str) -> None:
        """Do nothing: the model was cut when it was made. Raises ``RuntimeError`` for a place where it is not cut."""
        cuts = list(self.steps.partition.cuts)
        if cut_point not in cuts:
            raise RuntimeError(
                f"cut_pipeline_stage({cut_point!r}): the model was cut after {', '.join(cuts) or 'no layer'} when it "
                f"was made, and other ranks hold the rest. Give NxDPPModel(..., pipeline_cuts=[{cut_point!r}, ...])."
            )

    @UnlessWrapped
    def partition(self) -> None:
        """Do nothing: the model was cut when it was made."""

    @UnlessWrapped
    def register_shared_weights(self) -> None:
        """Do nothing: weights that several stages use were found when the model was made (``tied_names``)."""

    def refresh(self) -> None:
        """Trace and exchange metadata anew; every rank calls it after ``requires_grad`` or modules changed."""
        self.part.refresh()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load this rank's part of a state dict, which may cover the whole model.

        With ``assign`` the given tensors replace the parameters. With ``strict`` the state dict must have all tensors
        of this rank, and no names that the whole model does not have.

        Raises ``RuntimeError`` for an optimizer that holds parameters to be replaced.
        """
        return self.part.load(state_dict, strict, assign)

    def train(self, mode: bool = True) -> Self:
        """Set training mode as ``train`` of the wrapped module does, which may leave some modules in evaluation mode.

        It also selects the graph that is traced.
        """
        self.original_module.train(mode)
        self.training = mode
        follow_training_modes(self.local_module, self.original_module, mode)
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        if not works_on_meta(fn):
            self.part.check_materialised()
        MOVE.of(super())(fn, recurse)
        self.part.follow()
        return self

    def initial_weights_of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """CPU tensors with the weights that ``materialise`` would give to ``tensors`` of this rank; not collective.

        The model stays as it is. Raises ``RuntimeError`` for tensors that nothing initialises.
        """
        return self.part.initial.of_tensors(tensors)

    def replace_local_tensors(self, replaced: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Replace the first parameter or buffer of each pair by the second; not collective."""
        self.part.end_load(replaced)


if not TYPE_CHECKING:
    NxDPPModel.__init__.__signature__ = _SIGNATURE
    NxDPPModel.__init__ = knows_its_keywords(NxDPPModel.__init__)

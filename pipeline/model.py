"""NxDPPModel: a model cut into stages, of which this rank holds and trains its own."""

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Self

import torch
from torch import fx, nn

from nxdpp.initialization.initialisers import check_param_init_fn
from nxdpp.parallel_layers import move_model_to_device, parallel_state
from nxdpp.parallel_layers.gradient_average import average_gradients
from nxdpp.pipeline import arguments
from nxdpp.pipeline.agreement.fingerprint import parameter_lines
from nxdpp.pipeline.agreement.same_step import check_replicas
from nxdpp.pipeline.cost.balanced_partition import check_partition, cuts_by_cost
from nxdpp.pipeline.example_inputs import example_shapes
from nxdpp.pipeline.local.part import LocalPart
from nxdpp.pipeline.local.tied_weights import TiedWeights
from nxdpp.pipeline.local.tree import owners_by_rank
from nxdpp.pipeline.local.upkeep import LocalUpkeep, works_without_values
from nxdpp.pipeline.local.view import LocalView
from nxdpp.pipeline.microbatch import check_inputs, join_outputs, split_inputs
from nxdpp.pipeline.partition.assignment import layers_in_order
from nxdpp.pipeline.partition.cuts import check_cuts, even_cuts, stages_of_layers
from nxdpp.pipeline.post_partition_hooks import PostPartitionHook, call_hooks, checked_hooks
from nxdpp.pipeline.runtime.mean_loss import mean_everywhere
from nxdpp.pipeline.runtime.step_runner import Steps
from nxdpp.pipeline.stages.loss import LossSpec, check_loss_spec
from nxdpp.pipeline.stages.program import RankProgram
from nxdpp.pipeline.stages.program_cache import ProgramCache, TracedVariant, Variant, fill_output
from nxdpp.pipeline.timeline.chrome_trace import check_path
from nxdpp.schedules.chosen import ChosenSchedule, Written
from nxdpp.tracing.huggingface import refuse_packed_positions
from nxdpp.tracing.layers import find_layer_classes, layer_names, resolve_classes
from nxdpp.tracing.trace import TracingOptions


class NxDPPModel(LocalView):
    """A model that is trained by a pipeline of ranks, each holding some of its layers.

    The arguments and their meaning are those of NeuronX Distributed's ``NxDPPModel``. Construction traces the
    model, cuts it after transformer layers, and frees what other stages hold, in ``module`` itself. It is
    collective with ``partition="profiled"`` only, but every rank must do it, with the same model and arguments,
    after ``parallel_state.initialize_model_parallel``. After ``parallel_state.initialize_debug`` one process shows
    what a rank of a large job would hold; nothing can be run then.

    Args:
        module: the model, with the same weights on every rank.
        transformer_layer_cls: class, or name of a class, of the layers after which can be cut; by default what
            a Hugging Face model declares in ``_no_split_modules``, or its ``GradientCheckpointingLayer`` classes.
        num_microbatches: into how many microbatches a batch is split.
        virtual_pipeline_size: stages a rank; 1 leaves it to the ``schedule``, which has two where it is one that
            interleaves stages or turns around.
        output_loss_value_spec: a dict, tuple or bool with ``True`` in the place of the loss; by default the
            ``loss`` of a dict or ``ModelOutput``, or a lone value.
        return_mb_loss: return a list with the loss of each microbatch in place of their mean.
        broadcast_and_average_loss: return the mean loss, over data-parallel ranks too, on every rank.
        pipeline_cuts: names of the layers after which to cut, one fewer than there are stages; by default the
            layers are split evenly, more of them on the later stages. A cut after the last layer leaves the last
            stage the norm and the head.
        input_names: names of the inputs; ``run_train`` then takes exactly those. By default any.
        leaf_module_cls: classes, or names of classes, of modules that are not traced through.
        autowrap_functions: Python functions that are not traced through.
        autowrap_modules: Python modules, none of whose functions is traced through.
        tracer_cls: ``"hf"``, which traces only what stands above layers; ``"torch"``, plain ``torch.fx``; or
            a ``torch.fx.Tracer`` class. By default ``"hf"``.
        param_init_fn: for a model on the meta device: a function of a module, or of a module and a device, that
            initialises the parameters and buffers that are this module's own. It is called, once the model is cut, for
            each local module that has some, with the CPU as the default device. What it draws by torch's default
            generator does not depend on the partition; other random numbers (NumPy's, a generator of its own) are its
            own affair. Without it a model of transformers is initialised by its
            ``_init_weights`` and other modules by their ``reset_parameters``, when ``materialise`` or
            ``move_model_to_device`` is called.
        trace_file_path: a file for a Chrome trace of what each rank did when, for Perfetto and ``python -m nxdpp
            timeline``; whole after each step. Data-parallel replicas write beside it (``trace.pipeline1.json``).
            A file that is there is replaced. It makes a step end together on all ranks, and a little slower.
        use_zero1_optimizer: leave averaging gradients over data-parallel ranks to the optimizer.
        auto_partition: split the layers evenly, said explicitly; excludes ``pipeline_cuts``.
        deallocate_pipeline_outputs: free an activation once it is sent; only its place in the autograd graph
            is kept for the backward.
        partition: ``"even"``; or cut so that the slowest stage has the least work for microbatches like
            ``partition_batch``, which is counted (``"balanced"``), or measured on the device of global rank 0
            (``"profiled"``: construction is then collective over all ranks). Excludes ``pipeline_cuts`` and
            ``auto_partition``.
        partition_batch: the inputs of one microbatch with labels; meta tensors will do. The trace at construction is
            for inputs like these; by default it is for a Hugging Face model's main input and labels, or the inputs
            that another module's ``forward`` cannot do without.
        partition_memory_limit: bytes that a rank has for its weights, gradients, AdamW's state and the activations
            that the schedule keeps; where no balanced cut fits, ``ValueError``.
        schedule: the name of a family (``python -m nxdpp schedule --compare`` shows them all), the path of a CSV file,
            or the actions of each rank (``[["0F0", "0B0"], ["1F0", "1B0"]]``). By default ``"1f1b"``, and
            ``"interleaved"`` with several stages a rank.
        post_partition_hooks: functions of the wrapped model, called in order at the end of construction: to freeze,
            cast, checkpoint, or replace layers, modules and parameters, in ``local_module`` or ``original_module``. A
            weight of several stages stays shared by name. What one raises has a note that names it.

    Raises:
        ValueError, TypeError: for an argument that cannot be honoured, before anything is changed.
        TracingError: for a model that cannot be traced.
        RuntimeError: where ``initialize_model_parallel`` has not been called.
    """

    def __init__(
        self,
        module: nn.Module,
        transformer_layer_cls: Any | None = None,
        num_microbatches: int = 1,
        virtual_pipeline_size: int = 1,
        output_loss_value_spec: LossSpec = None,
        return_mb_loss: bool = False,
        broadcast_and_average_loss: bool = False,
        pipeline_cuts: Sequence[str] | None = None,
        input_names: Sequence[str] | None = None,
        leaf_module_cls: Sequence[Any] | None = None,
        autowrap_functions: Sequence[Callable[..., Any]] | None = None,
        autowrap_modules: Sequence[ModuleType] | None = None,
        tracer_cls: str | type[fx.Tracer] | None = None,
        param_init_fn: Any | None = None,
        trace_file_path: str | None = None,
        use_zero1_optimizer: bool = False,
        auto_partition: bool | None = False,
        deallocate_pipeline_outputs: bool = False,
        partition: str = "even",
        partition_batch: Mapping[str, torch.Tensor] | None = None,
        partition_memory_limit: int | None = None,
        schedule: Written | None = None,
        post_partition_hooks: Sequence[PostPartitionHook] | None = None,
    ) -> None:
        super().__init__()
        hooks = checked_hooks(post_partition_hooks)
        arguments.check_kinds(module, pipeline_cuts, input_names, leaf_module_cls)
        self.rank = parallel_state.get_pipeline_model_parallel_rank()
        ranks = parallel_state.get_pipeline_model_parallel_size()
        check_param_init_fn(param_init_fn, module)
        trace_path = None if trace_file_path is None else check_path(trace_file_path)
        if trace_path is not None:
            parallel_state.refuse_in_debug("trace_file_path")
        arguments.check_number_of_microbatches(num_microbatches)
        chosen = ChosenSchedule(schedule, ranks, num_microbatches, virtual_pipeline_size)
        self.stages = chosen.placement.stages
        self.local_stages = chosen.placement.stages_of(self.rank)
        self.holds_last_stage = self.stages - 1 in self.local_stages
        arguments.check_loss_returns(return_mb_loss, broadcast_and_average_loss)
        arguments.check_tracer(tracer_cls)
        arguments.check_wraps(autowrap_functions or (), autowrap_modules or ())
        check_loss_spec(output_loss_value_spec)
        if input_names is not None:
            arguments.check_names(module, input_names, "input_names")
        if auto_partition and pipeline_cuts is not None:
            raise ValueError("auto_partition=True and pipeline_cuts exclude each other: give one of them.")
        check_partition(partition, partition_batch, partition_memory_limit, pipeline_cuts, auto_partition)
        if partition_batch is not None:
            arguments.check_names(module, list(partition_batch), "partition_batch")

        options = TracingOptions(
            layer_classes=find_layer_classes(module, transformer_layer_cls),
            leaf_classes=resolve_classes(module, leaf_module_cls or (), "leaf_module_cls"),
            autowrap_functions=tuple(autowrap_functions or ()),
            autowrap_modules=tuple(autowrap_modules or ()),
            tracer_cls=tracer_cls,
        )
        settings = {
            "schedule": chosen.name,
            "stages": self.stages,
            "num_microbatches": num_microbatches,
            "broadcast_and_average_loss": broadcast_and_average_loss,
            "trace": trace_path is not None,
        }
        self._programs = ProgramCache(module, options, output_loss_value_spec, self.local_stages, settings)
        specs = arguments.first_inputs(module, input_names, partition_batch)
        first = self._programs.trace(
            Variant(tuple(sorted(specs.items())), (), module.training), example_shapes(module, specs, partition_batch)
        )
        self.layers = layers_in_order(first, layer_names(module, options.layer_classes))
        if pipeline_cuts is not None:
            self.pipeline_cuts = check_cuts(pipeline_cuts, self.layers, self.stages)
        elif partition_batch is not None and partition != "even":
            self.pipeline_cuts = cuts_by_cost(
                first, module, partition_batch, self.layers, partition, chosen, partition_memory_limit
            )
        else:
            self.pipeline_cuts = even_cuts(self.layers, self.stages)
        arguments.warn_of_lost_hooks(module, self.layers)
        layer_stages = stages_of_layers(self.pipeline_cuts, self.layers)
        self.stage_layers = [layer for layer, stage in layer_stages.items() if stage in self.local_stages]
        self.num_microbatches = num_microbatches
        self.return_mb_loss = return_mb_loss
        self.broadcast_and_average_loss = broadcast_and_average_loss
        self.input_names = None if input_names is None else list(input_names)
        self.use_zero1_optimizer = use_zero1_optimizer
        self.deallocate_pipeline_outputs = deallocate_pipeline_outputs
        self._rank_of_last_stage = chosen.placement.rank_of(self.stages - 1)
        self._steps = Steps(chosen, self.rank, keep_outputs=not deallocate_pipeline_outputs, trace_path=trace_path)
        self._replicas_agree = False
        # The whole model, for tracing; not a submodule, because most of it is not here.
        self.__dict__["original_module"] = module
        owners = self._programs.place(first, layer_stages, self.stages)
        self._part = LocalPart(
            module,
            owners_by_rank(owners, chosen.placement.rank_of),
            self.rank,
            self.layers,
            torch.initial_seed(),
            param_init_fn,
        )
        self.local_module = self._part.module
        self._tied = TiedWeights(self.local_module, self._part.tied, self.rank)
        self._upkeep = LocalUpkeep(self._part, module, self._tied, self._programs.replace)
        if self._part.is_made_at_once:
            self.materialise()
        self.train(module.training)
        call_hooks(hooks, self)
        self._after_move()

    original_module: nn.Module

    @property
    def last_busy_share(self) -> float:
        """Share of the last step, between 0 and 1, in which this rank computed."""
        return self._steps.busy_share

    @property
    def tied_names(self) -> list[list[str]]:
        """The names, in the whole model, of each parameter and each buffer that has several."""
        return self._part.aliases

    def materialise(self) -> None:
        """Give values to what this rank holds of a model built on the meta device; not collective.

        Parameters that have values, and those of a model that was built in memory, stay as they are. What a
        parameter is drawn from follows from the seed that torch had when the model was wrapped, and from the
        parameter's name: it is the same for any partition, if all ranks had the same seed. ``param_init_fn``, the
        ``_init_weights`` of transformers' models or a module's ``reset_parameters`` draws it. A model of
        ``deferred_init``, or one with a ``param_init_fn``, has its values since it was wrapped.

        Raises:
            RuntimeError: for parameters and buffers that nothing gives values to, before anything is changed.
        """
        if self._part.materialise():
            self._steps.origin = self._part.origin
            self._after_move()

    def run_train(self, *positional: Any, **inputs: Any) -> torch.Tensor | list[torch.Tensor] | None:
        """Forward and backward of all microbatches; collective over all ranks.

        Args:
            inputs: the model's inputs, the same on all ranks of a pipeline. Tensors are split along dimension 0;
                those of first dimension 1 beside larger ones, numbers, strings, booleans and ``None`` go whole
                to every microbatch.

        Returns:
            On the rank that has the last stage (``holds_last_stage``: the last rank, or the first where the schedule is
            V-shaped) the detached mean of the microbatches' losses (a list of them with ``return_mb_loss``), ``None``
            on others; with ``broadcast_and_average_loss`` the mean on every rank.
            Gradients of the mean are added to ``.grad``.

        Raises:
            ValueError, TypeError: for inputs that cannot be used, before anything is sent.
            TracingError: for inputs with which the model cannot be traced.
            RuntimeError: where gradients are off, and for a step that fails, which ends all ranks.
        """
        parallel_state.refuse_in_debug("run_train")
        if not torch.is_grad_enabled():
            raise RuntimeError("run_train needs gradients, and they are off (torch.no_grad()): use run_eval there.")
        microbatches = self._microbatches(positional, inputs)
        variant = self._programs.for_inputs(microbatches[0], self.original_module.training)
        program = self._programs.loss_program(variant)
        self._tied.set_aside()
        results = self._steps.run(program, microbatches, self._device(), train=True)
        self._tied.add_up(self._steps.transport(self._device()))
        if not self.use_zero1_optimizer:
            self._average_gradients()
        return self._return_loss([result[0] for result in results if result])

    def run_eval(self, *positional: Any, **inputs: Any) -> Any:
        """Forward of all microbatches, without gradients; collective over all ranks.

        Takes inputs as ``run_train`` does. Returns the loss as that does where the output has one; otherwise,
        on the rank of the last stage, the model's output with the microbatches concatenated along dimension 0.
        """
        parallel_state.refuse_in_debug("run_eval")
        microbatches = self._microbatches(positional, inputs)
        variant = self._programs.for_inputs(microbatches[0], self.original_module.training)
        has_loss = self._programs.has_named_loss(variant)
        make = self._programs.loss_program if has_loss else self._programs.output_program
        program = make(variant)
        with torch.no_grad():
            results = self._steps.run(program, microbatches, self._device(), train=False)
        if has_loss:
            return self._return_loss([result[0] for result in results if result])
        return self._return_output(variant, program, results)

    def move_model_to_device(self, device: torch.device | str | int | None = None) -> None:
        """Move this rank's parameters and buffers, by default to its CUDA device under NCCL, to the CPU under gloo.

        Collective over all ranks. Parameters without values are initialised first, see ``materialise``. Copies of a
        weight that several ranks hold get the values of its first owner. Attributes, gradients and ``requires_grad``
        survive. Call it before making the optimizer.

        Raises:
            ValueError: for a device that is not there, and for the meta device, before anything is changed.
            RuntimeError: for an optimizer that holds parameters which have to be replaced, where copies of a weight
                have different shapes or dtypes, and where values of data-parallel replicas differ (a sample of each).
        """
        target = self._upkeep.check_device(device)
        self.materialise()
        move_model_to_device(self.local_module, target)
        self._after_move()
        self._upkeep.make_equal(self._steps.transport, self._device())

    def refresh(self) -> None:
        """Forget what the stages have agreed about the values between them; the next step agrees anew.

        To be called by every rank after ``requires_grad`` of parameters has changed or modules have been replaced.
        """
        self._upkeep.follow()
        self._programs.forget_engines()
        self._replicas_agree = False

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """The same as ``load_local_state_dict``; with ``assign`` the given tensors take the parameters' places.

        ``RuntimeError`` then for an optimizer that holds parameters which would be replaced.
        """
        result = self._upkeep.load(state_dict, strict, assign)
        self._after_move()
        return result

    def train(self, mode: bool = True) -> Self:
        """Set training mode, which also decides how the model is traced."""
        self.original_module.train(mode)
        return super().train(mode)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        if not works_without_values(fn):
            self._check_materialised()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._after_move()
        return self

    def replace_local_tensors(self, replaced: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Put for each pair the second parameter or buffer wherever the first one is; not collective."""
        if replaced:
            self._upkeep.replace(replaced)
            self._after_move()

    def _after_move(self) -> None:
        self._upkeep.follow()
        self._programs.forget_modules()
        self._steps.forget_device()

    def _device(self) -> torch.device:
        parameter = next(self.local_parameters(), None)
        return parallel_state.local_device() if parameter is None else parameter.device

    def _microbatches(self, positional: Sequence[Any], inputs: Mapping[str, Any]) -> list[dict[str, Any]]:
        arguments.check_not_positional(positional)
        if self.input_names is not None:
            arguments.check_exact_names(list(inputs), self.input_names)
        else:
            arguments.check_names(self.original_module, list(inputs), "inputs")
        self._check_materialised()
        refuse_packed_positions(self.original_module, inputs)
        check_inputs(inputs, self.num_microbatches, self._device())
        return split_inputs(inputs, self.num_microbatches)

    def _check_materialised(self) -> None:
        without = self._part.without_values()
        if without:
            raise RuntimeError(
                f"{len(without)} parameters or buffers of rank {self.rank} are on the meta device and have no values "
                f"({without[0]} is the first). Call move_model_to_device() or materialise(), which initialise them, or "
                f"nxdpp.load_pretrained(model, directory); and make the optimizer after it."
            )

    def _average_gradients(self) -> None:
        group = parallel_state.get_data_parallel_group()
        if not self._replicas_agree:
            origin = [] if self._part.origin is None else [self._part.origin]
            check_replicas([*origin, *parameter_lines(self.local_named_parameters())], group)
            self._replicas_agree = True
        average_gradients(self.local_parameters(), group)

    def _return_loss(self, losses: list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor] | None:
        if self.broadcast_and_average_loss:
            return mean_everywhere(losses, self._rank_of_last_stage, self._device())
        if not self.holds_last_stage:
            return None
        return losses if self.return_mb_loss else torch.stack(losses).mean()

    def _return_output(self, variant: TracedVariant, program: RankProgram, results: list[list[Any]]) -> Any:
        if not self.holds_last_stage:
            return None
        named = [dict(zip(program.results, values, strict=True)) for values in results]
        return join_outputs([fill_output(variant.output, values) for values in named])

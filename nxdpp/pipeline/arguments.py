"""Checks of arguments, before anything is changed, and calls of the functions that are given as arguments."""

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

from nxdpp.schedules.chosen import ChosenSchedule
from nxdpp.schedules.simulate import simulate

_logger = logging.getLogger(__name__)

_TRACERS = ("hf", "torch")
_PARTITIONS = ("even", "balanced", "profiled")


_LISTS = ("pipeline_cuts", "input_names", "shared_inputs", "leaf_module_cls")


def check_kinds(settings: Any) -> None:
    """Raise ``TypeError`` unless the model is an ``nn.Module``, and names are in lists."""
    module = settings.module
    if not isinstance(module, nn.Module):
        raise TypeError(f"the model must be a torch.nn.Module, not {module!r:.80}.")
    scripted = next((n for n, part in module.named_modules() if isinstance(part, torch.jit.ScriptModule)), None)
    if scripted is not None:
        raise TypeError(
            f"{scripted or 'the model'} is a module of TorchScript (torch.jit), which cannot be cut, and whose "
            f"parameters cannot be freed. Give the Python module; torch.compile(layer) of its layers makes them fast."
        )
    for name in _LISTS:
        if isinstance(value := getattr(settings, name), str | type):
            raise TypeError(f"{name}={value!r} must be a list: {name}=[{value!r}].")


def warn_of_idle_ranks(schedule: ChosenSchedule) -> None:
    """Log a warning on rank 0 for fewer microbatches than ranks of the pipeline, with the share of idle time."""
    ranks, microbatches = schedule.ranks, schedule.microbatches
    if microbatches >= ranks or not dist.is_initialized() or dist.get_rank():
        return
    _logger.warning(
        "num_microbatches=%d on %d pipeline ranks: a rank waits for others in %.0f %% of a training step's time. Set "
        "num_microbatches (gradient_accumulation_steps of a Trainer) to %d or more, which divide the rows of a batch: "
        "with %d microbatches of 1F1B it is %.0f %%.",
        microbatches,
        ranks,
        100 * simulate(schedule.training).mean_bubble,
        2 * ranks,
        2 * ranks,
        100 * (ranks - 1) / (3 * ranks - 1),
    )


def warn_of_own_listings(module: nn.Module) -> None:
    """Log a warning for a ``module`` whose class has its own listing of parameters, such as of the trained ones."""
    own = [name for name in ("parameters", "named_parameters") if _is_overridden(module, name)]
    if own:
        _logger.warning(
            "%s has its own %s(), which the wrapped model does not use: its listings have all parameters of a rank. An "
            "optimizer gets them all, unless they do not require gradients",
            type(module).__name__,
            "() and ".join(own),
        )


def _is_overridden(module: nn.Module, name: str) -> bool:
    owner = next(cls for cls in type(module).__mro__ if name in vars(cls))
    return not owner.__module__.startswith("torch.")


def check_trained_dtypes(module: nn.Module) -> None:
    """Raise ``RuntimeError`` for a parameter of ``module`` in float16 that is trained.

    Its gradient would be float16 too. Small values are zero there, and an unscaled one cannot be told from a scaled.
    """
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype == torch.float16:
            kind = parameter.device.type
            raise RuntimeError(
                f"{name} is a parameter in float16 that is trained: its small gradients and updates would become zero. "
                f"Keep parameters in float32 (model.float()), and run the step under torch.autocast({kind!r}, "
                f"torch.float16) with NxDPPModel(..., grad_scaler=nxdpp.GradScaler({kind!r})). Or train in bfloat16 "
                f"(model.bfloat16()), which needs no scale. Frozen parameters may be in float16."
            )


def check_number_of_microbatches(microbatches: Any) -> None:
    """Raise ``ValueError`` unless ``microbatches`` is a positive whole number."""
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
        raise ValueError(f"num_microbatches={microbatches!r} must be a whole number of at least 1.")


def check_split_inputs_fn(function: Any) -> None:
    """Raise ``TypeError`` unless ``function`` is callable or ``None``."""
    if function is not None and not callable(function):
        raise TypeError(f"split_inputs_fn={function!r} must be a function of the inputs and num_microbatches.")


_FLAGS = ("use_optimizer_wrapper", "fuse_microbatches", "return_loss_on_cpu")
_CHOICES: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "check_against_module": ((None, "first"), "'first', for the first training step, or None."),
    "check_inputs": (
        ("first", "always", "never"),
        "'first', 'always' or 'never': when the ranks of a pipeline compare the values of floating inputs.",
    ),
    "gradient_reduction": (
        ("mean", "sum"),
        "'mean', gradients of the mean loss over microbatches and replicas, or 'sum', those of the sum.",
    ),
    "loss_over": (("microbatch", "batch"), "'microbatch', or 'batch' for one loss of all rows."),
    "loss_normalization": (
        ("microbatch", "tokens"),
        "'microbatch', the mean over microbatches, or 'tokens', the mean over all labels of the batch.",
    ),
}


def check_choices(settings: Any) -> None:
    """Raise ``TypeError`` or ``ValueError`` for a setting with none of its values, and for two settings at odds."""
    for name in _FLAGS:
        if not isinstance(value := getattr(settings, name), bool):
            raise TypeError(f"{name}={value!r} must be True or False.")
    for name, (allowed, told) in _CHOICES.items():
        if (value := getattr(settings, name)) not in allowed:
            raise ValueError(f"{name}={value!r} must be {told}")
    for sentence, is_wrong in _refused_together(settings).items():
        if is_wrong:
            raise ValueError(sentence)


def _refused_together(settings: Any) -> dict[str, Any]:
    """Return sentences of refusals, each with whether ``settings`` have what it refuses."""
    by, over_batch = settings.loss_normalization, settings.loss_over == "batch"
    is_sum = settings.gradient_reduction == "sum"
    losses, auto, is_split = settings.return_mb_loss, settings.auto_partition, settings.split_inputs_fn is not None
    # The text of a policy may have the whole model.
    partition = repr(settings.partition) if auto else ""
    return {
        "fuse_microbatches=True joins microbatches in one graph of XLA, and nxdpp compiles no graphs. Leave it out; "
        "num_microbatches is the number of microbatches that run.": settings.fuse_microbatches,
        f"autowrap_obj_methods={settings.autowrap_obj_methods!r:.80}: a graph does not tell which parameters a method "
        f"reads, so no stage would hold them. Name the class of the object in leaf_module_cls if it holds no layer, or "
        f"make the method's body a function and name it in autowrap_functions.": settings.autowrap_obj_methods,
        "return_mb_loss=True and loss_over='batch' exclude each other: there is one loss of all rows.": losses
        and over_batch,
        "return_mb_loss=True and broadcast_and_average_loss=True exclude each other: the losses of the microbatches "
        "stay on the last pipeline rank, the mean goes to all. Set one of them to False.": losses
        and settings.broadcast_and_average_loss,
        "auto_partition=True and pipeline_cuts exclude each other: give one of them.": auto
        and settings.pipeline_cuts is not None,
        f"partition={partition} and auto_partition=True, the even partition, exclude each other: give one "
        f"of them.": auto and settings.partition != "even",
        "split_inputs_fn and shared_inputs exclude each other: the function returns all inputs of each microbatch, "
        "shared ones too. Leave shared_inputs out.": is_split and settings.shared_inputs is not None,
        "split_inputs_fn and batch_dimension exclude each other: the function returns all inputs of each microbatch. "
        "Leave batch_dimension out.": is_split and settings.batch_dimension is not None,
        f"gradient_reduction='sum' and loss_normalization={by!r} exclude each other: the latter is a mean over the "
        f"whole batch. Leave one of them out.": is_sum and by != "microbatch",
        "gradient_reduction='sum' and use_zero1_optimizer=True exclude each other: the optimizer takes the mean over "
        "replicas. Leave one of them out.": is_sum and settings.use_zero1_optimizer,
        "loss_fn and output_loss_value_spec exclude each other: loss_fn gets the whole output, and returns the loss. "
        "Leave output_loss_value_spec out.": settings.loss_fn is not None
        and settings.output_loss_value_spec is not None,
        "loss_over='batch' needs loss_fn, which is called on the outputs of all microbatches: a loss that the model "
        "computes is of one microbatch. Return the outputs from forward, and give loss_fn=lambda output, labels: "
        "...": over_batch and settings.loss_fn is None,
        f"loss_over='batch' and loss_normalization={by!r} exclude each other: loss_fn sees all rows, and divides as it "
        f"likes. Leave loss_normalization out.": over_batch and by != "microbatch",
        "count_items_fn is for loss_normalization='tokens'. Give both, or neither.": settings.count_items_fn is not None
        and by != "tokens",
    }


def check_tracer(tracer_cls: Any) -> None:
    """Raise ``ValueError`` unless ``tracer_cls`` is the name of a tracer, a tracer class or ``None``."""
    is_class = isinstance(tracer_cls, type) and issubclass(tracer_cls, fx.Tracer)
    if tracer_cls is not None and tracer_cls not in _TRACERS and not is_class:
        raise ValueError(f"tracer_cls={tracer_cls!r} must be 'hf', 'torch', or a subclass of torch.fx.Tracer.")


def check_wraps(functions: Sequence[Any], modules: Sequence[Any]) -> None:
    """Raise ``TypeError`` unless ``functions`` and ``modules`` are Python functions and Python modules.

    Either list may have both: the API guide of NeuronX Distributed prints the type of one at the name of the other.
    """
    for name, entries in (("autowrap_functions", functions), ("autowrap_modules", modules)):
        for entry in entries:
            is_function = callable(entry) and not isinstance(entry, type | nn.Module)
            if not is_function and not inspect.ismodule(entry):
                raise TypeError(
                    f"{name} takes Python functions and Python modules (import math; [math]), not {entry!r}."
                )


def check_manual(settings: Any) -> None:
    """Raise ``ValueError`` for the functions of a manual partition without one, and for other cuts with one."""
    functions = ("manual_pp_stage_partition_fn", "manual_pp_loss_fn")
    is_manual, others = settings.manual_pp_partition, ("transformer_layer_cls", "pipeline_cuts", "loss_fn")
    wrong = [name for name in (others if is_manual else functions) if getattr(settings, name)]
    if wrong:
        relation = "excludes" if is_manual else "is needed for"
        raise ValueError(f"manual_pp_partition=True {relation} {', '.join(wrong)}.")


# Arguments of NxD's trace, which traces here at construction.
_OF_TRACE = {"leaf_modules": "leaf_module_cls"} | {
    name: name for name in ("autowrap_functions", "autowrap_modules", "autowrap_obj_methods", "tracer_cls")
}


def input_names_of_trace(inputs: Mapping[str, Any]) -> Sequence[str]:
    """Return the ``input_names`` of a call of ``trace`` as in NxD. Raises ``ValueError`` for its other arguments."""
    late = [name for name, value in inputs.items() if name != "input_names" and value is not None]
    if late:
        constructor = _OF_TRACE.get(late[0], "partition_batch")
        raise ValueError(
            f"trace(input_names=..., {late[0]}=...): the model was traced and cut when it was made. Give "
            f"NxDPPModel(..., {constructor}=...)."
        )
    names: Sequence[str] = inputs["input_names"]
    return names


def check_partition(partition: Any, batch: Any, memory_limit: Any, pipeline_cuts: Sequence[str] | None) -> None:
    """Raise ``ValueError`` for an unknown policy, for one that lacks its inputs, and for two policies at once."""
    if memory_limit is not None and (isinstance(memory_limit, bool) or not isinstance(memory_limit, int)):
        raise ValueError(f"partition_memory_limit={memory_limit!r} must be a whole number of bytes: 80 * 2**30.")
    if memory_limit is not None and memory_limit < 1:
        raise ValueError(f"partition_memory_limit={memory_limit} must be at least one byte.")
    if not callable(partition) and partition not in _PARTITIONS:
        raise ValueError(
            f"partition={partition!r} must be one of {', '.join(map(repr, _PARTITIONS))}, or a function of the traced "
            f"graph and the number of stages."
        )
    if pipeline_cuts is not None and partition != "even":
        raise ValueError(f"partition={partition!r} and pipeline_cuts exclude each other: give one of them.")
    by_cost = isinstance(partition, str) and partition != "even"
    if memory_limit is not None and not by_cost:
        raise ValueError(
            "partition_memory_limit is for partition='balanced' and 'profiled'; other partitions consider no memory."
        )
    if by_cost or batch is not None:
        _check_batch(partition, batch)


def _check_batch(partition: str, batch: Any) -> None:
    if not isinstance(batch, Mapping) or not any(isinstance(value, torch.Tensor) for value in batch.values()):
        raise ValueError(
            f"partition={partition!r} needs partition_batch: the inputs of one microbatch with labels. Their shapes "
            f"decide. Meta tensors are allowed: dict(input_ids=torch.empty(1, 2048, dtype=torch.int64, "
            f"device='meta'), labels=...)."
        )
    others = [name for name, value in batch.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise ValueError(f"partition_batch takes tensors only; other values: {others}.")


PostPartitionHook = Callable[[Any], None]
"""A function of the wrapped model."""


def checked_hooks(hooks: Any) -> tuple[PostPartitionHook, ...]:
    """Return ``post_partition_hooks`` as a tuple. Raises ``TypeError`` unless they are a list of functions."""
    if hooks is None:
        return ()
    if not isinstance(hooks, Iterable):
        raise TypeError(f"post_partition_hooks={hooks!r} must be a list of functions of the wrapped model.")
    found = tuple(hooks)
    for number, hook in enumerate(found):
        if not callable(hook):
            raise TypeError(
                f"post_partition_hooks[{number}] is {hook!r}, which cannot be called. Give functions of the wrapped "
                f"model, as in post_partition_hooks=[apply_checkpoint]."
            )
    return found


def call_hooks(hooks: Iterable[PostPartitionHook], model: Any, rank: int) -> None:
    """Call ``hooks`` in order. An error gets a note with the hook and the pipeline ``rank``."""
    for number, hook in enumerate(hooks):
        try:
            hook(model)
        except Exception as error:
            error.add_note(f"raised by post_partition_hooks[{number}], {_name(hook)}, on pipeline rank {rank}")
            raise


def _name(hook: Any) -> str:
    function = hook.func if isinstance(hook, functools.partial) else hook
    return getattr(function, "__qualname__", None) or type(function).__qualname__

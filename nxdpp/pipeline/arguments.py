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


def check_kinds(module: Any, **lists: Any) -> None:
    """Raise ``TypeError`` unless ``module`` is an ``nn.Module`` and the others are lists or ``None``."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"the model must be a torch.nn.Module, not {module!r:.80}.")
    scripted = next((n for n, part in module.named_modules() if isinstance(part, torch.jit.ScriptModule)), None)
    if scripted is not None:
        raise TypeError(
            f"{scripted or 'the model'} is a module of TorchScript (torch.jit), which cannot be cut, and whose "
            f"parameters cannot be freed. Give the Python module; torch.compile(layer) of its layers makes them fast."
        )
    for name, value in lists.items():
        if isinstance(value, str | type):
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


def check_split_inputs_fn(function: Any, shared_inputs: Any) -> None:
    """Raise ``TypeError`` unless ``function`` is callable or ``None``, and ``ValueError`` for both settings."""
    if function is not None and not callable(function):
        raise TypeError(f"split_inputs_fn={function!r} must be a function of the inputs and num_microbatches.")
    if function is not None and shared_inputs is not None:
        raise ValueError(
            "split_inputs_fn and shared_inputs exclude each other: the function returns all inputs of each microbatch, "
            "shared ones too. Leave shared_inputs out."
        )


def check_gradient_reduction(name: Any, loss_normalization: str, use_zero1_optimizer: bool) -> None:
    """Raise ``ValueError`` unless ``name`` is ``"mean"`` or ``"sum"``, or where a sum cannot be had."""
    if name not in ("mean", "sum"):
        raise ValueError(
            f"gradient_reduction={name!r} must be 'mean', gradients of the mean loss over microbatches and replicas, "
            f"or 'sum', those of the sum."
        )
    if name == "sum" and loss_normalization != "microbatch":
        raise ValueError(
            f"gradient_reduction='sum' and loss_normalization={loss_normalization!r} exclude each other: the latter is "
            f"a mean over the whole batch. Leave one of them out."
        )
    if name == "sum" and use_zero1_optimizer:
        raise ValueError(
            "gradient_reduction='sum' and use_zero1_optimizer=True exclude each other: the optimizer takes the mean "
            "over replicas. Leave one of them out."
        )


def check_reference(name: Any) -> None:
    """Raise ``ValueError`` unless ``name`` is ``None`` or ``"first"``."""
    if name is not None and name != "first":
        raise ValueError(f"check_against_module={name!r} must be 'first', for the first training step, or None.")


def check_floating_inputs(name: Any) -> None:
    """Raise ``ValueError`` unless ``name`` is ``"first"``, ``"always"`` or ``"never"``."""
    if name not in ("first", "always", "never"):
        raise ValueError(
            f"check_inputs={name!r} must be 'first', 'always' or 'never': when the ranks of a pipeline compare the "
            f"values of floating inputs."
        )


def check_loss_returns(return_mb_loss: bool, broadcast_and_average_loss: bool, loss_over: str = "microbatch") -> None:
    """Raise ``ValueError`` for both kinds of returned loss at once, and for losses of microbatches without any."""
    if return_mb_loss and loss_over == "batch":
        raise ValueError("return_mb_loss=True and loss_over='batch' exclude each other: there is one loss of all rows.")
    if return_mb_loss and broadcast_and_average_loss:
        raise ValueError(
            "return_mb_loss=True and broadcast_and_average_loss=True exclude each other: the losses of the "
            "microbatches stay on the last pipeline rank, the mean goes to all. Set one of them to False."
        )


def check_auto_partition(auto_partition: bool | None, pipeline_cuts: Sequence[str] | None, partition: Any) -> None:
    """Raise ``ValueError`` where ``auto_partition``, the even partition, meets another choice of cuts."""
    if auto_partition and pipeline_cuts is not None:
        raise ValueError("auto_partition=True and pipeline_cuts exclude each other: give one of them.")
    if auto_partition and partition != "even":
        raise ValueError(
            f"partition={partition!r} and auto_partition=True, the even partition, exclude each other: give one of "
            f"them."
        )


def check_scripts_arguments(use_optimizer_wrapper: Any, fuse_microbatches: Any, return_loss_on_cpu: Any) -> None:
    """Raise ``TypeError`` or ``ValueError`` for arguments of NxD's scripts that cannot be honoured."""
    given = {
        "use_optimizer_wrapper": use_optimizer_wrapper,
        "fuse_microbatches": fuse_microbatches,
        "return_loss_on_cpu": return_loss_on_cpu,
    }
    for name, value in given.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}={value!r} must be True or False.")
    if fuse_microbatches:
        raise ValueError(
            "fuse_microbatches=True joins microbatches in one graph of XLA, and nxdpp compiles no graphs. Leave it "
            "out; num_microbatches is the number of microbatches that run."
        )


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


def check_obj_methods(methods: Any) -> None:
    """Raise ``ValueError`` for ``methods`` of objects that are not to be traced through."""
    if methods:
        raise ValueError(
            f"autowrap_obj_methods={methods!r:.80}: a graph does not tell which parameters a method reads, so no stage "
            f"would hold them. Name the class of the object in leaf_module_cls if it holds no layer, or make the "
            f"method's body a function and name it in autowrap_functions."
        )


def check_manual(is_manual: bool, functions: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for the ``functions`` of a manual partition without one, and for ``others`` with one."""
    wrong = [name for name, value in (others if is_manual else functions).items() if value]
    if wrong:
        relation = "excludes" if is_manual else "is needed for"
        raise ValueError(f"manual_pp_partition=True {relation} {', '.join(wrong)}.")


# Arguments of NxD's trace, which traces here at construction.
_OF_TRACE = {
    "leaf_modules": "leaf_module_cls",
    "autowrap_functions": "autowrap_functions",
    "autowrap_modules": "autowrap_modules",
    "autowrap_obj_methods": "autowrap_obj_methods",
    "tracer_cls": "tracer_cls",
    "args": "partition_batch",
    "kwargs": "partition_batch",
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

"""Configuration of a training: the dict of NeuronX Distributed's trainer, checked and completed."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from nxdpp.pipeline.model import NxDPPModel
from nxdpp.ranks import parallel_state

_OPTIMIZER = {"zero_one_enabled": False, "grad_clipping": True, "max_grad_norm": 1.0}

# Keys of pipeline_config with which NxD chooses between wrappers. The trainer's wrappers are always used.
_OF_WRAPPERS = ("use_model_wrapper", "use_optimizer_wrapper")


def neuronx_distributed_config(
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    expert_parallel_size: int = 1,
    context_parallel_size: int = 1,
    pipeline_config: Mapping[str, Any] | None = None,
    optimizer_config: Mapping[str, Any] | None = None,
    activation_checkpoint_config: Any = None,
    pad_model: bool = False,
    sequence_parallel: bool = False,
    model_init_config: Mapping[str, Any] | None = None,
    lora_config: Any = None,
    mixed_precision_config: Mapping[str, Any] | None = None,
    sequential_move_factor: int = 11,
    lnc_size: int = 1,
) -> dict[str, Any]:
    """Return the configuration of a training, and call ``initialize_model_parallel`` if it was not called.

    Collective over all ranks; every rank gives the same arguments.

    Args:
        tensor_parallel_size, pipeline_parallel_size: ranks that share each layer, and ranks in a pipeline.
        expert_parallel_size, context_parallel_size, lnc_size: 1.
        pipeline_config: arguments of ``NxDPPModel``. On one rank ``run_train`` uses them.
            ``use_model_wrapper``, ``use_optimizer_wrapper`` and ``use_zero1_optimizer`` change nothing: gradients
            are averaged once, by the optimizer with ``zero_one_enabled``, and otherwise by ``run_train``.
        optimizer_config: ``zero_one_enabled`` (``False``), ``grad_clipping`` (``True``), ``max_grad_norm`` (1.0).
        activation_checkpoint_config: ``"full"`` recomputes every transformer layer, a module class or a tuple of them
            the modules of these classes. By default nothing is recomputed.
        pad_model: pad the ``config.num_attention_heads`` heads of the model to a multiple of ``tensor_parallel_size``.
        sequence_parallel: sum the gradients of parameters with ``sequence_parallel_enabled`` over the tensor ranks.
        model_init_config: ``meta_device_init`` (``False``) builds the model on the meta device, with the initial
            weights of ``param_init_fn``.
        lora_config: ``None``.
        mixed_precision_config: for ZeRO-1, whose ``zero_one_enabled`` is the default of the first two.
            ``use_master_weights``: float32 copies of half parameters. ``use_fp32_grad_acc``: gradients of half
            parameters accumulate and are averaged in float32, which needs torch 2.10.
            ``use_master_weights_in_ckpt`` changes nothing: checkpoints always have the master weights of ZeRO-1.
        sequential_move_factor: of ``model_init_config`` too; without effect: all ranks build their models at the same
            time, on the meta device if memory is short.

    Raises:
        ValueError, TypeError: for options that cannot be honoured, by name, before anything is changed.
        RuntimeError: after an initialization with different sizes.
    """
    ones = {
        "expert_parallel_size": expert_parallel_size,
        "context_parallel_size": context_parallel_size,
        "lnc_size": lnc_size,
    }
    for name, size in ones.items():
        if size != 1:
            raise ValueError(f"{name}={size!r} is not supported: leave it out, or give 1.")
    if lora_config is not None:
        raise ValueError(
            "lora_config is not supported: adapt the model with peft.get_peft_model in model_fn, before it is wrapped."
        )
    _check_flag("pad_model", pad_model)
    _check_flag("sequence_parallel", sequence_parallel)
    _check_checkpointing(activation_checkpoint_config)
    optimizer = _completed("optimizer_config", optimizer_config, _OPTIMIZER)
    norm = optimizer["max_grad_norm"]
    if optimizer["grad_clipping"] and not (isinstance(norm, int | float) and norm > 0):
        raise ValueError(
            f"optimizer_config: max_grad_norm={norm!r:.80} must be a number above 0. grad_clipping=False leaves "
            f"gradients as they are."
        )
    config: dict[str, Any] = {
        "tensor_parallel_size": tensor_parallel_size,
        "pipeline_parallel_size": pipeline_parallel_size,
        **ones,
        "pipeline_config": _pipeline(pipeline_config, bool(optimizer["zero_one_enabled"])),
        "optimizer_config": optimizer,
        "activation_checkpoint_config": activation_checkpoint_config,
        "pad_model": bool(pad_model),
        "sequence_parallel": bool(sequence_parallel),
        "model_init_config": _model_init(model_init_config, sequential_move_factor),
        "lora_config": lora_config,
        "mixed_precision_config": _mixed_precision(mixed_precision_config, optimizer["zero_one_enabled"]),
    }
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_parallel_size, pipeline_parallel_size)
    check_sizes(config)
    return config


def check_sizes(nxd_config: Any) -> None:
    """Raise ``TypeError`` for something other than a configuration, ``RuntimeError`` for sizes other than the job's."""
    if not isinstance(nxd_config, dict) or "optimizer_config" not in nxd_config:
        raise TypeError(f"nxd_config must be the result of neuronx_distributed_config(...), not {nxd_config!r:.80}.")
    given = nxd_config["tensor_parallel_size"], nxd_config["pipeline_parallel_size"]
    state = parallel_state.get_tensor_model_parallel_size(), parallel_state.get_pipeline_model_parallel_size()
    if given != state:
        raise RuntimeError(
            f"the configuration has tensor_parallel_size={given[0]} and pipeline_parallel_size={given[1]}, and model "
            f"parallelism is initialized with {state[0]} and {state[1]}: give the same, or call "
            f"destroy_model_parallel() before neuronx_distributed_config."
        )
    divided = {
        (
            "expert_model_parallel_size",
            "experts",
            "expert_parallelize",
        ): parallel_state.get_expert_model_parallel_size(),
        ("context_parallel_size", "sequences", "context_parallelize"): parallel_state.get_context_model_parallel_size(),
    }
    for (name, what, function), ranks in divided.items():
        if ranks > 1:
            raise RuntimeError(
                f"model parallelism is initialized with {name}={ranks}, and the trainer divides no {what}: wrap the "
                f"model by NxDPPModel(nxdpp.{function}(model), ...), or leave the size out."
            )


def _pipeline(given: Mapping[str, Any] | None, has_zero1: bool) -> dict[str, Any] | None:
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise TypeError(f"pipeline_config must be a dict, not {given!r:.80}.")
    known = [name for name in inspect.signature(NxDPPModel).parameters if name != "module"]
    unknown = [name for name in given if name not in (*known, *_OF_WRAPPERS)]
    if unknown:
        raise ValueError(f"pipeline_config has {unknown}, which NxDPPModel does not take. It takes {', '.join(known)}.")
    kept = {name: value for name, value in given.items() if name not in _OF_WRAPPERS}
    return {**kept, "use_zero1_optimizer": has_zero1}


def _model_init(given: Mapping[str, Any] | None, factor_by_default: int) -> dict[str, Any]:
    defaults = {"sequential_move_factor": factor_by_default, "meta_device_init": False, "param_init_fn": None}
    config = _completed("model_init_config", given, defaults)
    factor = config["sequential_move_factor"]
    if not isinstance(factor, int) or not 1 <= factor <= 32:
        raise ValueError(f"sequential_move_factor={factor!r} must be a number from 1 to 32.")
    if config["param_init_fn"] is not None and not callable(config["param_init_fn"]):
        raise TypeError(f"model_init_config: param_init_fn={config['param_init_fn']!r:.80} must be a function.")
    return config


def _mixed_precision(given: Mapping[str, Any] | None, has_zero1: bool) -> dict[str, Any]:
    defaults = {"use_master_weights": has_zero1, "use_fp32_grad_acc": has_zero1, "use_master_weights_in_ckpt": False}
    config = _completed("mixed_precision_config", given, defaults)
    for name in defaults:
        if config[name] and not has_zero1:
            raise ValueError(
                f"mixed_precision_config: {name}=True is an option of ZeRO-1: set zero_one_enabled=True in "
                f"optimizer_config, or leave it out. AdamW_FP32OptimParams has float32 copies without ZeRO-1."
            )
    return config


def _completed(name: str, given: Mapping[str, Any] | None, defaults: Mapping[str, Any]) -> dict[str, Any]:
    if given is None:
        return dict(defaults)
    if not isinstance(given, Mapping):
        raise TypeError(f"{name} must be a dict, not {given!r:.80}.")
    unknown = [key for key in given if key not in defaults]
    if unknown:
        raise ValueError(f"{name} has {unknown}, which have no meaning here. It takes {', '.join(defaults)}.")
    for key, value in given.items():
        if isinstance(defaults[key], bool):
            _check_flag(f"{name}: {key}", value)
    return {**defaults, **given}


def _check_flag(name: str, value: Any) -> None:
    # The text "False" of a file would be true.
    if not isinstance(value, bool | int) or value not in (0, 1):
        raise TypeError(f"{name}={value!r:.80} must be True or False.")


def _check_checkpointing(value: Any) -> None:
    classes = value if isinstance(value, tuple | list) else [value]
    are_modules = all(isinstance(each, type) and issubclass(each, nn.Module) for each in classes)
    if value is None or value == "full" or (classes and are_modules):
        return
    raise TypeError(
        f"activation_checkpoint_config={value!r:.80} must be 'full', None, a class of modules or a tuple of them."
    )

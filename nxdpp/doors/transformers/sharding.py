"""FSDP in the words of ``TrainingArguments``, as calls of ``fully_shard``.

::

    fsdp=True                                          fully_shard(model, reshard_after_forward=True)
    fsdp_config={"reshard_after_forward": False}       fully_shard(model, reshard_after_forward=False)
                {"cpu_offload": True}                  fully_shard(model, offload_policy=CPUOffloadPolicy())
                {"activation_checkpointing": True}     apply_checkpoint(model), before it
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from nxdpp.pipeline.activation_checkpoint import apply_checkpoint
from nxdpp.pipeline.fully_shard import fully_shard
from nxdpp.pipeline.model import NxDPPModel
from nxdpp.tracing.modules.layers import find_layer_classes

_UNITS = "each layer of the pipeline is a unit, and so is the rest of each stage. Leave it out."
_FSDP1 = "it belongs to FSDP1. Leave it out."
_XLA = "fully_shard is for the CPU and CUDA. Leave it out."
REFUSED = {
    "cpu_ram_efficient_loading": "build the model under nxdpp.init_on_device(torch.device('meta')), and call "
    "nxdpp.load_pretrained(trainer.pipelined, folder).",
    "min_num_params": _UNITS,
    "xla": _XLA,
    "xla_fsdp_v2": _XLA,
    "xla_fsdp_grad_ckpt": _XLA,
    "xla_fsdp_settings": _XLA,
    "forward_prefetch": _FSDP1,
    "backward_prefetch": _FSDP1,
    "use_orig_params": _FSDP1,
    "sync_module_states": _FSDP1,
    "limit_all_gathers": _FSDP1,
}
"""Keys of ``fsdp_config`` that are refused unless they are off, with the reason."""

_OF_VALUES = {
    "version": (
        2,
        "FSDP1 has no fully_shard. Set 2; data_parallel_shard_size of initialize_model_parallel gives hybrid shards.",
    ),
    "state_dict_type": ("FULL_STATE_DICT", "a checkpoint has a Hugging Face directory, and each rank's state in it."),
    "auto_wrap_policy": ("TRANSFORMER_BASED_WRAP", _UNITS),
}
_HONOURED = {*_OF_VALUES, "reshard_after_forward", "cpu_offload", "activation_checkpointing"}
_LAYERS = "transformer_layer_cls_to_wrap"


def check_sharding(args: TrainingArguments) -> None:
    """Raise ``ValueError`` for ``fsdp`` and ``fsdp_config`` that cannot be honoured, by key; not collective."""
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        raise ValueError(
            "PipelineTrainer cannot honour use_fsdp of accelerate's configuration, which would wrap the pipeline: give "
            "TrainingArguments fsdp=True, and start without it."
        )
    config = args.fsdp_config or {}
    if not args.fsdp:
        if config:
            raise ValueError(f"PipelineTrainer cannot honour fsdp_config={config!r}: it is read with fsdp=True.")
        return
    assert isinstance(config, dict), "TrainingArguments reads a file"
    for key, value in config.items():
        if key in _OF_VALUES:
            allowed, reason = _OF_VALUES[key]
            is_taken = str(value).upper() == str(allowed)
        else:
            is_taken = key in _HONOURED or key == _LAYERS or (key in REFUSED and value in (False, 0, "false", None))
            reason = REFUSED.get(key, f"it is unknown. It takes {', '.join(sorted(_HONOURED | {_LAYERS}))}.")
        if not is_taken:
            raise ValueError(f"PipelineTrainer cannot honour {key}={value!r} of fsdp_config: {reason}")
    if args.optim == OptimizerNames.ADAFACTOR:
        raise ValueError(
            "PipelineTrainer cannot honour optim='adafactor' with fsdp: a rank has only rows. Take adamw_torch."
        )
    if args.activation_checkpointing and _is_recomputed(args):
        raise ValueError("activation_checkpointing of fsdp_config recomputes the layers: leave the argument out.")


def check_layers(args: TrainingArguments, model: nn.Module, transformer_layer_cls: Any) -> None:
    """Raise ``ValueError`` if ``fsdp_config`` names other layers than the pipeline's; not collective."""
    config: Any = args.fsdp_config or {}
    named = config.get(_LAYERS) if args.fsdp else None
    if named is None:
        return
    layers = {each.__name__ for each in find_layer_classes(model, transformer_layer_cls)}
    if set(named) != layers:
        raise ValueError(f"PipelineTrainer cannot honour {_LAYERS}={named}: its layers are {sorted(layers)}. {_UNITS}")


def shard(model: NxDPPModel, args: TrainingArguments) -> None:
    """Shard ``model`` as ``args`` say, if they do; collective over all ranks. Raises as ``fully_shard`` does."""
    if not args.fsdp:
        return
    if _is_recomputed(args):
        apply_checkpoint(model)
    options = args.fsdp_plugin_args
    offload = CPUOffloadPolicy(args.device.type != "cpu") if options.get("cpu_offload") else None
    fully_shard(model, reshard_after_forward=options["reshard_after_forward"], offload_policy=offload)


@contextmanager
def kept_from_accelerate(args: TrainingArguments) -> Iterator[None]:
    """Make an accelerator in the block that does not shard the model itself."""
    options, args.fsdp_plugin_args = args.fsdp_plugin_args, None
    try:
        yield
    finally:
        args.fsdp_plugin_args = options


def _is_recomputed(args: TrainingArguments) -> bool:
    return bool(args.fsdp_plugin_args.get("activation_checkpointing"))

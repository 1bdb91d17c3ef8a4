"""Every field of ``TrainingArguments``: honoured, of no effect in any Trainer, or refused by name.

A field that is in no table belongs to a newer transformers. It is refused if it has a value other than its default.
"""

import dataclasses
from collections.abc import Container
from typing import Any

from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from nxdpp.doors.transformers.generating import FIELDS
from nxdpp.doors.transformers.sharding import check_sharding
from nxdpp.pipeline.layer_compilation import check_options
from nxdpp.tensor.rank_files import local_path

HONOURED = frozenset(
    {
        # Length and batches of the training.
        *("output_dir", "per_device_train_batch_size", "num_train_epochs", "max_steps", "gradient_accumulation_steps"),
        *("average_tokens_across_devices", "max_grad_norm", "seed", "data_seed", "full_determinism"),
        # Optimizer and schedule of the learning rate.
        *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim", "optim_args"),
        *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
        # Numbers and memory.
        *("bf16", "tf32", "use_cpu", "use_cache", "torch_empty_cache_steps"),
        *("activation_checkpointing", "activation_checkpointing_kwargs"),
        *("gradient_checkpointing", "gradient_checkpointing_kwargs"),
        *("torch_compile", "torch_compile_backend", "torch_compile_mode"),
        # Logs.
        *("logging_strategy", "logging_steps", "logging_first_step", "logging_nan_inf_filter", "log_on_each_node"),
        *("include_num_input_tokens_seen", "log_level", "log_level_replica", "disable_tqdm", "skip_memory_metrics"),
        *("report_to", "run_name", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
        # Evaluation.
        *("eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "per_device_eval_batch_size"),
        *("prediction_loss_only", "eval_do_concat_batches", "eval_accumulation_steps", "include_for_metrics"),
        "batch_eval_metrics",
        # Checkpoints.
        *("save_strategy", "save_steps", "save_total_limit", "save_only_model", "load_best_model_at_end"),
        *("metric_for_best_model", "greater_is_better", "ignore_data_skip", "restore_callback_states_from_checkpoint"),
        # Data.
        *("dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
        *("dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order"),
        *("remove_unused_columns", "label_names", "train_sampling_strategy", "length_column_name"),
        *("accelerator_config", "ddp_backend", "ddp_timeout", "fsdp", "fsdp_config"),
    }
)
"""Fields that mean what they mean for ``Trainer``; ``check_arguments`` refuses some of their values."""

_SCRIPTS = "scripts read it; Trainer itself does not"
_HUB = "it is read with push_to_hub=True alone"
WITHOUT_EFFECT = {
    "do_train": _SCRIPTS,
    "do_eval": _SCRIPTS,
    "do_predict": _SCRIPTS,
    "resume_from_checkpoint": f"{_SCRIPTS}: train(resume_from_checkpoint=...) resumes",
    "local_rank": "the launcher's variables give the rank",
    "hub_model_id": _HUB,
    "hub_token": _HUB,
    "hub_strategy": _HUB,
    "hub_private_repo": _HUB,
    "hub_always_push": _HUB,
    "hub_revision": _HUB,
}
"""Fields that have no effect here, with the reason: nor have they in ``Trainer``."""

_DDP = "gradients are averaged without DistributedDataParallel. Leave it out."
_EVAL = "evaluate with bf16=True (autocast), or load the saved model in a lower precision."
REFUSED = {
    "label_smoothing_factor": "the last stage computes the model's own loss. Smooth labels in the model's forward.",
    "fp16": "float16 needs a scaled loss. Use bf16=True, or NxDPPModel with grad_scaler=nxdpp.GradScaler().",
    "fp16_full_eval": _EVAL,
    "bf16_full_eval": _EVAL,
    "use_liger_kernel": "it replaces modules after the model is cut. Apply it to the model before the trainer is made.",
    "liger_kernel_config": "it belongs to use_liger_kernel, which is refused.",
    "neftune_noise_alpha": "its noise has other numbers on each rank. Put it into the model's embedding.",
    "optim_target_modules": "it is for optimizers that are refused: they need the whole model on each rank.",
    "auto_find_batch_size": "a rank without memory ends the job. Choose per_device_train_batch_size, or "
    "activation_checkpointing=True.",
    "eval_use_gather_object": "predictions must be tensors. Return tensors from the model.",
    "save_on_each_node": "all ranks write one checkpoint. Give an output_dir that all hosts share.",
    "enable_jit_checkpoint": "a signal reaches ranks at different steps. Save by save_strategy='steps'.",
    "push_to_hub": "call save_model(), and upload the directory from one process.",
    "parallelism_config": "PipelineTrainer's own arguments give the layout: pipeline_parallel_size.",
    "ddp_find_unused_parameters": _DDP,
    "ddp_bucket_cap_mb": _DDP,
    "ddp_broadcast_buffers": _DDP,
    "ddp_static_graph": _DDP,
    "deepspeed": "the pipeline divides the model already. Leave it out; fsdp=True divides its replicas.",
    "debug": "its hooks would not see other ranks' stages. Leave it out.",
}
"""Fields that are refused with a value other than their default, with the reason and the remedy."""

OPTIMIZERS = frozenset(
    {
        OptimizerNames.ADAMW_TORCH,
        OptimizerNames.ADAMW_TORCH_FUSED,
        OptimizerNames.ADAFACTOR,
        OptimizerNames.ADAGRAD,
        OptimizerNames.RMSPROP,
        OptimizerNames.SGD,
    }
)
"""Values of ``optim`` whose step of a parameter needs no other parameter, and that tests compare."""

# Values after TrainingArguments has normalized them.
_NORMALIZED: dict[str, tuple[Any, ...]] = {"debug": ("", [], None)}
_OF_ACCELERATOR = {
    "split_batches": "per_device_train_batch_size is the batch of a replica.",
    "dispatch_batches": "each rank reads its batches itself.",
    "non_blocking": "the pipeline copies batches to the device itself.",
    "gradient_accumulation_kwargs": "gradient_accumulation_steps accumulates in one step of the pipeline.",
    "use_configured_state": "TrainingArguments makes the state.",
}


def compile_options(args: TrainingArguments) -> dict[str, Any]:
    """The arguments of ``torch.compile`` that ``args`` gives; empty without ``torch_compile``."""
    if not args.torch_compile:
        return {}
    return {"backend": args.torch_compile_backend or "inductor", "mode": args.torch_compile_mode}


def check_arguments(args: TrainingArguments, more: Container[str] = ()) -> None:
    """Raise ``ValueError`` for a field of ``args`` that ``PipelineTrainer`` cannot honour; not collective.

    A subclass honours ``more`` fields.
    """
    for field in dataclasses.fields(args):
        if field.name in HONOURED | FIELDS or field.name in WITHOUT_EFFECT or field.name in more:
            continue
        value = getattr(args, field.name)
        if value in _NORMALIZED.get(field.name, (_default(field),)):
            continue
        reason = REFUSED.get(
            field.name, "it is newer than this PipelineTrainer. Leave it out, or use nxdpp's own loop."
        )
        raise ValueError(f"PipelineTrainer cannot honour {field.name}={value!r}: {reason}")
    _check_values(args)


def check_replicas(args: TrainingArguments, replicas: int) -> None:
    """Raise ``ValueError`` for settings that ``replicas`` data-parallel replicas cannot honour; not collective."""
    if replicas == 1:
        return
    if not args.average_tokens_across_devices:
        raise ValueError(
            f"average_tokens_across_devices=False with {replicas} data-parallel replicas weights each replica's mean "
            f"alike, and the loss here is the mean over the tokens of all. Leave it at True."
        )
    if not getattr(args.accelerator_config, "even_batches", True) and not args.dataloader_drop_last:
        raise ValueError(
            f"accelerator_config: even_batches=False gives {replicas} replicas different numbers of batches. Leave it "
            f"at True, or set dataloader_drop_last=True."
        )


def _check_values(args: TrainingArguments) -> None:
    local_path(args.output_dir or ".")
    check_sharding(args)
    if options := compile_options(args):
        check_options(options)
    if args.optim not in OPTIMIZERS:
        names = ", ".join(sorted(each.value for each in OPTIMIZERS))
        name = str(OptimizerNames(args.optim).value)
        raise ValueError(
            f"PipelineTrainer cannot honour optim={name!r}: a rank has some layers only. It takes {names}; or give "
            f"optimizers=(optimizer, scheduler)."
        )
    if args.train_sampling_strategy == "batch_rebalance":
        raise ValueError(
            "PipelineTrainer cannot honour train_sampling_strategy='batch_rebalance', which balances over all ranks. "
            "Use 'group_by_length'."
        )
    for name, reason in _OF_ACCELERATOR.items():
        value = getattr(args.accelerator_config, name, None)
        if value:
            raise ValueError(f"PipelineTrainer cannot honour accelerator_config: {name}={value!r}: {reason}")


def _default(field: "dataclasses.Field[Any]") -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default

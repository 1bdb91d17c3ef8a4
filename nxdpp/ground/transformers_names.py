"""Private names of transformers and accelerate, by what nxdpp does with them. A use follows the word nxdpp."""

from nxdpp.ground.names import PrivateAttribute, PrivateName

# What a model declares.
INIT_WEIGHTS = PrivateAttribute("transformers.PreTrainedModel._init_weights", "initialises modules of other libraries")
IS_INITIALIZED = PrivateAttribute(
    "transformers.PreTrainedModel._is_hf_initialized", "leaves out of an initialisation what a load has filled"
)
IGNORED_ON_SAVE = PrivateAttribute(
    "transformers.PreTrainedModel._keys_to_ignore_on_save", "leaves out of save_pretrained what transformers leaves out"
)
ADJUST_KEYS = PrivateAttribute(
    "transformers.PreTrainedModel._adjust_missing_and_unexpected_keys", "reports the keys of a load as transformers"
)
CONVERSIONS = PrivateAttribute(
    "transformers.PreTrainedModel._weight_conversions", "saves weights under the names of the directory they came from"
)
UNSPLIT = PrivateAttribute("transformers.PreTrainedModel._no_split_modules", "finds the layers of a model")
SLICE_INPUTS = PrivateAttribute(
    "transformers.models.gemma4.modeling_gemma4.Gemma4TextModel._maybe_slice_kv_shared_inputs",
    "traces the layers of Gemma 4 that share keys",
)
COLLECTOR = PrivateName(
    "transformers.utils.output_capturing._active_collector", "hands router logits of layers to the last stage"
)

# Generation.
REORDER_CACHE = PrivateAttribute(
    "transformers.XLNetLMHeadModel._reorder_cache", "refuses to reorder the cache of a model in a way of its own"
)
CACHE_LENGTH = PrivateAttribute(
    "transformers.GenerationMixin._previous_max_cache_length", "generates with a static cache of the length it needs"
)

# Trainers.
DATA_LOADERS = PrivateAttribute("accelerate.Accelerator._dataloaders", "hands prepared loaders to callbacks")
BEGIN_LOADER = PrivateAttribute("accelerate.state.GradientState._add_dataloader", "tells of the end of an evaluation")
END_LOADER = PrivateAttribute("accelerate.state.GradientState._remove_dataloader", "tells of the end of an evaluation")
FROM_MODEL_CONFIG = PrivateAttribute(
    "transformers.GenerationConfig._from_model_config", "evaluates by generated tokens as Seq2SeqTrainer"
)
DEFAULT_SETTINGS = PrivateAttribute(
    "transformers.GenerationConfig._get_default_generation_params", "evaluates by generated tokens as Seq2SeqTrainer"
)

# Tensor parallelism and experts.
TP_PLAN = PrivateAttribute("transformers.PreTrainedModel._tp_plan", "divides a model by the plan of its type")
GAUSSIAN_TOPK = PrivateAttribute(
    "transformers.models.gemma3n.modeling_gemma3n.Gemma3nTextMLP._gaussian_topk", "divides the layers of gemma3n"
)
EXPERTS = PrivateAttribute(
    "transformers.PretrainedConfig._experts_implementation", "refuses experts that a device does not run"
)

# Methods that classes of nxdpp have in place of transformers', TRL's and torch's.
_TRAINER = "evaluates, saves and resumes a pipelined model in a Trainer"
_GENERATION = "runs the forwards of generate on all ranks"
OVERRIDDEN = tuple(
    PrivateAttribute(f"{owner}.{name}", use)
    for owner, use, names in (
        (
            "transformers.Trainer",
            _TRAINER,
            "_clip_grad_norm _evaluate _finalize_training _get_eval_sampler _get_grad_norm _get_num_items_in_batch "
            "_get_train_sampler _load_best_model _load_from_checkpoint _load_optimizer_and_scheduler _load_rng_state "
            "_maybe_log_save_evaluate _move_model_to_device _prepare_inputs _save _save_checkpoint "
            "_save_optimizer_and_scheduler _track_num_input_tokens _validate_args _wrap_model",
        ),
        ("trl.DPOTrainer", _TRAINER, "_compute_loss _precompute_ref_logps _prepare_inputs"),
        (
            "transformers.GenerationMixin",
            _GENERATION,
            "_beam_search _has_unfinished_sequences _optimize_model_for_decode _prepare_cache_for_generation _sample "
            "_valid_auto_compile_criteria",
        ),
        ("transformers.integrations.finegrained_fp8.Fp8Dequantize", "loads FP8 files", "_dequantize_one"),
        ("torch.optim.Optimizer", "makes NxD's optimizers by their classes", "_patch_step_function"),
    )
    for name in names.split()
)

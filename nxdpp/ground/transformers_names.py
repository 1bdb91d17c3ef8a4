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
UNSPLIT = PrivateAttribute("transformers.PreTrainedModel._no_split_modules", "finds the layers of a model")
SLICE_INPUTS = PrivateAttribute(
    "transformers.models.gemma4.modeling_gemma4.Gemma4TextModel._maybe_slice_kv_shared_inputs",
    "traces the layers of Gemma 4 that share keys",
)
COLLECTOR = PrivateName(
    "transformers.utils.output_capturing._active_collector", "hands router logits of layers to the last stage"
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
PAD_TOKENS = PrivateName(
    "transformers.Seq2SeqTrainer._pad_tensors_to_max_len", "evaluates by generated tokens as Seq2SeqTrainer"
)

# Tensor parallelism and experts.
TP_PLAN = PrivateAttribute("transformers.PreTrainedModel._tp_plan", "divides a model by the plan of its type")
GAUSSIAN_TOPK = PrivateAttribute(
    "transformers.models.gemma3n.modeling_gemma3n.Gemma3nTextMLP._gaussian_topk", "divides the layers of gemma3n"
)
EXPERTS = PrivateAttribute(
    "transformers.PretrainedConfig._experts_implementation", "refuses experts that a device does not run"
)

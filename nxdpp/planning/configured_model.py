"""Model and microbatch of a Hugging Face configuration, on the meta device."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig

from nxdpp.planning.options import configuration_file

# The first task that has a model of the type is taken.
_TASKS = {
    "sequence-to-sequence LM": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    "masked LM": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING,
    "causal LM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    "speech recognition": modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    "image classification": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    "audio classification": modeling_auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING,
}
_ENCODES_AND_DECODES = ("sequence-to-sequence LM", "speech recognition")
# Configurations of parts that tokens do not run begin with these.
_OTHER_INPUTS = ("vision", "audio")
_DEFAULT_LENGTH = 2048


def read_configuration(path: Path) -> PreTrainedConfig:
    """Read a configuration file, or the ``config.json`` of a folder.

    Raises ``ValueError`` for a missing file, for one that is not a JSON object, and for one that transformers refuses.
    """
    file, content = configuration_file(path)
    if content["model_type"] not in CONFIG_MAPPING:
        raise ValueError(
            f"{file}: model_type is {content['model_type']!r}, which the installed transformers does not know. "
            f"It must be one of its types (llama, qwen3, bert, ...)."
        )
    try:
        return AutoConfig.from_pretrained(str(file))  # type: ignore[no-any-return]  # transformers gives no type
    except Exception as error:
        raise ValueError(f"{file} is refused by transformers: {type(error).__name__}: {error}") from error


def build_on_meta(config: PreTrainedConfig, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Build the model that ``architectures`` names, or the first one of the type.

    Without a ``dtype`` the parameters are as the constructor makes them, ``LlamaForCausalLM(config)``: of torch's
    default dtype, float32, even where the configuration names another. With one they are cast to it, as by
    ``model.to(dtype)``.

    Raises ``ValueError`` for a model of a task other than the six, and for a configuration that the model refuses.
    """
    model_class = _model_class(config)
    try:
        with torch.device("meta"):
            model = model_class(config)
    except Exception as error:
        raise ValueError(
            f"{model_class.__name__} cannot be built from this configuration: {type(error).__name__}: {error}"
        ) from error
    nn.Module.to(model, "meta", dtype)  # some models make a few parameters on another device
    model.train()
    return model


def microbatch_on_meta(model: PreTrainedModel, size: int, length: int | None) -> dict[str, torch.Tensor]:
    """Return inputs and labels of ``size`` samples ``B`` without data.

    Shapes: tokens ``(B, T)``, images ``(B, C, height, width)``.

    Args:
        model: the model.
        size: number of samples.
        length: number of tokens, by default 2048 or all positions. Images have the configuration's size.

    Raises:
        ValueError: for a length beyond the positions of the model, and for a model with other kinds of inputs.
    """
    config, name = model.config, str(model.main_input_name)
    if name == "input_ids":
        length = _length(config, length)
        return {name: _tokens(size, length), "labels": _tokens(size, length)}
    if name != "pixel_values":
        raise ValueError(
            f"{type(model).__name__} takes {name}; plans of a configuration are of models of tokens (input_ids) and of "
            f"images (pixel_values). Give the model and inputs= to nxdpp.plan."
        )
    if length is not None:
        raise ValueError(f"{type(model).__name__} takes {name} of the configuration's size. Leave --seq-length out.")
    sides = getattr(config, "image_size", None) or 224
    height, width = (sides, sides) if isinstance(sides, int) else sides
    shape = (size, getattr(config, "num_channels", 3), height, width)
    return {name: torch.empty(shape, dtype=model.dtype, device="meta"), "labels": _tokens(size)}


def parts_without_inputs(config: PreTrainedConfig, inputs: Collection[str]) -> list[str]:
    """Return a sentence for each part of the model whose inputs are not among ``inputs``: images, and audio."""
    parts = [name for name in getattr(config, "sub_configs", ()) if name.startswith(_OTHER_INPUTS)]
    if "input_ids" not in inputs:
        return []
    return [
        f"{name}: inputs are tokens alone. Its parameters count, its work and activations do not."
        for name in parts
        if getattr(config, name, None) is not None
    ]


def _length(config: PreTrainedConfig, length: int | None) -> int:
    given = getattr(config.get_text_config(), "max_position_embeddings", None) or 0
    # XLNet has -1 for any number.
    most: int = given if given > 0 else length or _DEFAULT_LENGTH
    if length is not None and length > most:
        raise ValueError(f"a sequence length of {length} is more than max_position_embeddings={most}.")
    return min(_DEFAULT_LENGTH, most) if length is None else length


def _tokens(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def _model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    for name in config.architectures or ():
        found = [cls for mapping in _TASKS.values() for cls in _classes(mapping, config) if cls.__name__ == name]
        if found:
            return found[0]
    if config.architectures:
        raise ValueError(
            f"architectures names {config.architectures}, but type {config.model_type} has no such model for "
            f"{', '.join(_TASKS)}. Name another in the configuration, or leave the field out."
        )
    encodes_and_decodes = bool(config.is_encoder_decoder)
    for task, mapping in _TASKS.items():
        if (task in _ENCODES_AND_DECODES) == encodes_and_decodes and (classes := _classes(mapping, config)):
            return classes[0]
    raise ValueError(f"transformers has no model of type {config.model_type} for {', '.join(_TASKS)}.")


def _classes(mapping: Mapping[Any, Any], config: PreTrainedConfig) -> tuple[type[PreTrainedModel], ...]:
    if type(config) not in mapping:
        return ()
    known = mapping[type(config)]
    return known if isinstance(known, tuple) else (known,)

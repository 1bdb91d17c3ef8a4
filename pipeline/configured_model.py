"""The model that a Hugging Face configuration describes, on the meta device, and the shape of a microbatch for it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig

# In the order in which a type of several tasks is taken for one of them.
_TASKS = {
    "sequence-to-sequence LM": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    "masked LM": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING,
    "causal LM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    "image classification": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
}
_DEFAULT_LENGTH = 2048


def read_configuration(path: Path) -> PreTrainedConfig:
    """The configuration in a file, or in ``config.json`` of a folder.

    Raises ``ValueError`` where there is none, where it is no JSON object, or of a type unknown to transformers.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        wanted = "it has no config.json" if path.is_dir() else "there is no such file"
        raise ValueError(f"{path}: {wanted}. Give a Hugging Face configuration file, or a folder with its config.json.")
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}.") from error
    model_type = content.get("model_type") if isinstance(content, dict) else None
    if model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"{file}: model_type is {model_type!r}, which the installed transformers does not know. "
            f"It must be one of its types (llama, qwen3, bert, ...)."
        )
    return AutoConfig.from_pretrained(str(file))  # type: ignore[no-any-return]


def build_on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    """The model that ``architectures`` names, or else the first of its type's; in the configuration's dtype.

    Raises ``ValueError`` where it is of none of the four tasks that are trained with labels.
    """
    model_class = _model_class(config)
    with torch.device("meta"):
        model: PreTrainedModel = model_class._from_config(config, dtype=config.dtype or torch.float32)
    nn.Module.to(model, "meta")  # a few parameters are made elsewhere regardless
    model.train()
    return model


def microbatch_on_meta(model: PreTrainedModel, size: int, length: int | None) -> dict[str, torch.Tensor]:
    """Inputs and labels of ``size`` samples without data: tokens of ``length`` (by default 2048), or images.

    Raises ``ValueError`` for a length that the model has no positions for, and for a model of other inputs.
    """
    config = model.config
    if model.main_input_name == "pixel_values":
        if length is not None:
            raise ValueError(f"{type(model).__name__} takes images: leave --seq-length out.")
        sides = getattr(config, "image_size", None) or 224
        height, width = (sides, sides) if isinstance(sides, int) else sides
        pixels = torch.empty(size, getattr(config, "num_channels", 3), height, width, device="meta", dtype=model.dtype)
        return {"pixel_values": pixels, "labels": _tokens(size)}
    if model.main_input_name != "input_ids":
        raise ValueError(
            f"{type(model).__name__} takes {model.main_input_name}; stages are planned for models of tokens "
            f"(input_ids) and of images (pixel_values)."
        )
    most = getattr(config.get_text_config(), "max_position_embeddings", None) or length or _DEFAULT_LENGTH
    length = min(_DEFAULT_LENGTH, most) if length is None else length
    if length > most:
        raise ValueError(f"a sequence length of {length} is more than max_position_embeddings={most}.")
    return {"input_ids": _tokens(size, length), "labels": _tokens(size, length)}


def _tokens(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def _model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    for name in config.architectures or ():
        found = [cls for mapping in _TASKS.values() for cls in _classes(mapping, config) if cls.__name__ == name]
        if found:
            return found[0]
    if config.architectures:
        raise ValueError(
            f"architectures names {config.architectures}, none of which is a model of type {config.model_type} for "
            f"{', '.join(_TASKS)}. Name another in the configuration, or leave the field out."
        )
    encodes_and_decodes = bool(config.is_encoder_decoder)
    for task, mapping in _TASKS.items():
        if (task == "sequence-to-sequence LM") == encodes_and_decodes and (classes := _classes(mapping, config)):
            return classes[0]
    raise ValueError(f"transformers has no model of type {config.model_type} for {', '.join(_TASKS)}.")


def _classes(mapping: Mapping[Any, Any], config: PreTrainedConfig) -> tuple[type[PreTrainedModel], ...]:
    if type(config) not in mapping:
        return ()
    known = mapping[type(config)]
    return known if isinstance(known, tuple) else (known,)

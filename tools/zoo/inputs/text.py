"""Token batches for language models and their heads."""

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from tools.zoo.inputs.shapes import PADDED, SHAPES, no_labels, padding, taken
from tools.zoo.shrinking import IMAGE, VOCABULARY

CODEBOOKS = {"musicgen_decoder", "musicgen_melody_decoder"}
CHOICES = 2
_OF_A_ROW = ("sequence-classification", "multiple-choice", "next-sentence")
_LANGUAGE_MODELS = ("masked-lm", "causal-lm", "seq2seq-lm", "pretraining", "image-text-to-text")


def batch(task: str, model: PreTrainedModel, shape_index: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Tokens, with the labels of the head that ``task`` names."""
    config = model.config
    vocabulary = min(VOCABULARY, getattr(config.get_text_config(), "vocab_size", None) or VOCABULARY)
    rows, length, target_length = SHAPES[shape_index]
    if config.model_type == "perceiver":
        length = config.max_position_embeddings  # its output has all positions

    def tokens(*shape: int) -> Tensor:
        return torch.randint(vocabulary // 4, vocabulary, shape, generator=generator)

    if config.model_type in CODEBOOKS:
        # Three dimensions: in the usual two, a batch could not be split by rows.
        given = {"input_ids": tokens(rows, config.num_codebooks, length)}
        target = given["input_ids"].transpose(1, 2)
    else:
        given = {"input_ids": tokens(rows, length)}
        target = given["input_ids"]
    if shape_index == PADDED:
        given["attention_mask"] = padding(rows, length)
    mask = given.get("attention_mask")
    if task in _LANGUAGE_MODELS and task != "causal-lm" and config.is_encoder_decoder:
        target = tokens(rows, target_length)
        mask = padding(rows, target_length) if shape_index == PADDED else None
    if mask is not None:
        target = target.masked_fill((mask == 0).view(*mask.shape, *[1] * (target.ndim - 2)), -100)
    given["labels"] = target.clone()
    given |= _other_inputs(config, given, generator)
    if task not in _LANGUAGE_MODELS:
        del given["labels"]
        _separate(task, config, given["input_ids"])
        given |= _head_labels(task, model, rows, length, generator)
    elif task == "pretraining":
        given |= _pretraining_labels(model, rows, generator)
    if task == "multiple-choice":
        given = {n: v.unsqueeze(1).repeat(1, CHOICES, 1) if v.ndim == 2 else v for n, v in given.items()}
    names = {"inputs" if name == "input_ids" and "input_ids" not in taken(model) else name: name for name in given}
    return {name: given[source] for name, source in names.items() if name in taken(model)}


def _separate(task: str, config: PreTrainedConfig, ids: Tensor) -> None:
    """Write the special tokens that a head looks for, before any padding."""
    end = ids.size(1) - 4
    if task == "sequence-classification" and config.is_encoder_decoder and config.eos_token_id is not None:
        ids[:, end] = config.eos_token_id
    if config.model_type == "longformer" and task in ("question-answering", "multiple-choice"):
        ids[:, [end // 2, end - 1, end]] = config.sep_token_id


def _head_labels(
    task: str, model: PreTrainedModel, rows: int, length: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Labels of a head; an empty dictionary for an encoder without one."""
    if task == "text-encoding":
        return {}
    if task.endswith("question-answering") and "start_positions" in taken(model):
        ends = {name: torch.randint(length // 2, (rows,), generator=generator) for name in ("start", "end")}
        return {f"{name}_positions": value for name, value in ends.items()}
    if task == "next-sentence" and "next_sentence_label" in taken(model):
        return {"next_sentence_label": torch.randint(2, (rows,), generator=generator)}
    if "labels" not in taken(model):
        raise no_labels(model)
    count = CHOICES if task == "multiple-choice" else getattr(model.config, "num_labels", None) or 2
    return {"labels": torch.randint(count, (rows,) if task in _OF_A_ROW else (rows, length), generator=generator)}


def _pretraining_labels(model: PreTrainedModel, rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    names = {"next_sentence_label", "sentence_order_label"} & taken(model)
    found = {name: torch.randint(2, (rows,), generator=generator) for name in sorted(names)}
    if not found and "labels" not in taken(model):
        raise no_labels(model)
    return found


def _other_inputs(config: PreTrainedConfig, given: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Inputs besides tokens that a type needs for its forward or its loss."""
    rows, length = given["input_ids"].shape[0], given["input_ids"].shape[-1]
    if config.model_type == "git":
        return {"pixel_values": torch.randn(rows, 3, IMAGE, IMAGE, generator=generator)}
    if config.model_type == "fsmt":
        return {"decoder_input_ids": given["labels"].clamp(min=0).roll(1, dims=1)}
    if config.model_type == "voxtral_realtime":
        frames = 2 * config.downsample_factor * length
        return {"input_features": torch.randn(rows, config.audio_config.num_mel_bins, frames, generator=generator)}
    if config.model_type == "lxmert":
        features = torch.randn(rows, 6, config.visual_feat_dim, generator=generator)
        return {"visual_feats": features, "visual_pos": torch.rand(rows, 6, 4, generator=generator)}
    if config.model_type == "bros":
        return {"bbox": torch.rand(rows, length, 8, generator=generator)}
    return {}

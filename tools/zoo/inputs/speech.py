"""Sound as samples or as frames of features, with the labels of a task."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from tools.zoo.inputs import text
from tools.zoo.inputs.shapes import PADDED, SHAPES, no_labels, padding, taken
from tools.zoo.shrinking import VOCABULARY

SAMPLES = (6400, 8000, 9600)
FRAMES = (64, 96, 128)
TARGET = (4, 6, 8)
# Features (rows, bins, frames); others have (rows, frames, bins).
_NEEDS_MASK = ("lasr_ctc", "parakeet_ctc", "parakeet_tdt", "parakeet_rnnt")
_TRANSDUCERS = ("rnnt", "tdt")
_BINS_FIRST = ("whisper", "moonshine_streaming")


def batch(task: str, model: PreTrainedModel, shape_index: int, generator: torch.Generator) -> dict[str, Tensor]:
    """``input_values`` or ``input_features`` if the forward takes only sound, otherwise tokens as for text."""
    config, names = model.config, taken(model)
    if model.main_input_name == "input_ids" or (task == "speech-seq2seq" and "input_ids" in names):
        return text.batch("seq2seq-lm", model, shape_index, generator)
    if "labels" not in names:
        raise no_labels(model)
    rows = SHAPES[shape_index][0]
    given, length = _sound(config, names, rows, shape_index, generator)
    masked = shape_index == PADDED or config.model_type in _NEEDS_MASK
    if masked and "attention_mask" in names and task != "audio-xvector":
        given["attention_mask"] = padding(rows, length)
    if task == "audio-frame-classification":
        frames = length
        if "input_values" in given:
            frames = int(_frames(model, length))
        classes = torch.randint(config.num_labels or 2, (rows, frames), generator=generator)
        return given | {"labels": torch.nn.functional.one_hot(classes, config.num_labels or 2)}
    labels = _labels(task, config, rows, shape_index, generator)
    if task in _TRANSDUCERS:
        # A transducer predicts from the labels so far, from a blank on.
        start = torch.full((rows, 1), config.blank_token_id)
        return given | {"labels": labels, "decoder_input_ids": torch.cat([start, labels], 1)}
    return given | {"labels": labels}


def _frames(model: Any, samples: int) -> Tensor:
    frames: Tensor = model._get_feat_extract_output_lengths(torch.tensor(samples))
    return frames


def _sound(
    config: PreTrainedConfig, names: frozenset[str], rows: int, shape_index: int, generator: torch.Generator
) -> tuple[dict[str, Tensor], int]:
    bins = _first(config, ("num_mel_bins", "feature_projection_input_dim", "feature_size", "input_feat_per_channel"))
    if config.model_type == "audio-spectrogram-transformer":
        return {"input_values": torch.randn(rows, config.max_length, bins, generator=generator)}, 0
    if "input_features" in names and "input_values" not in names:
        if config.model_type in _BINS_FIRST:
            frames = 2 * config.max_source_positions
            return {"input_features": torch.randn(rows, bins, frames, generator=generator)}, frames
        frames = FRAMES[shape_index]
        return {"input_features": torch.randn(rows, frames, bins, generator=generator)}, frames
    samples = SAMPLES[shape_index]
    return {"input_values": torch.randn(rows, samples, generator=generator)}, samples


def _labels(task: str, config: PreTrainedConfig, rows: int, shape_index: int, generator: torch.Generator) -> Tensor:
    if task in ("speech-seq2seq", "ctc", *_TRANSDUCERS):
        vocabulary = getattr(config.get_text_config(decoder=True), "vocab_size", None) or VOCABULARY
        low, high = min(VOCABULARY, vocabulary) // 4, min(VOCABULARY, vocabulary)
        return torch.randint(low, high, (rows, TARGET[shape_index]), generator=generator)
    return torch.randint(config.num_labels or 2, (rows,), generator=generator)


def _first(config: PreTrainedConfig, names: tuple[str, ...]) -> int:
    configs = [config, *(part for part in vars(config).values() if isinstance(part, PreTrainedConfig))]
    found = (getattr(part, name, None) for part in configs for name in names)
    return next((value for value in found if isinstance(value, int)), 16)

"""Text with the sound that it becomes: spectrograms or codes."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tools.zoo.inputs import text
from tools.zoo.inputs.shapes import PADDED, SHAPES, padding, taken
from tools.zoo.shrinking import VOCABULARY

FRAMES_OF_A_TOKEN = 2


def batch(task: str, model: PreTrainedModel, shape_index: int, generator: torch.Generator) -> dict[str, Tensor]:
    """``input_ids`` ``(rows, tokens)`` with spectrograms ``(rows, frames, bins)`` or codes as labels."""
    config, names = model.config, taken(model)
    rows, length, target_length = SHAPES[shape_index]
    codebooks = getattr(getattr(config, "decoder", None), "num_codebooks", None)
    if task == "text-to-waveform" and codebooks is None and "spectrogram_labels" not in names:
        return text.batch("seq2seq-lm", model, shape_index, generator)
    speaking = getattr(config, "model_config", config)
    vocabulary = min(VOCABULARY, getattr(speaking, "vocab_size", VOCABULARY))
    given = {"input_ids": torch.randint(vocabulary // 4, vocabulary, (rows, length), generator=generator)}
    if shape_index == PADDED or config.model_type == "speecht5":
        given["attention_mask"] = padding(rows, length)
    if codebooks is not None:
        codes = torch.randint(VOCABULARY, (rows, codebooks, target_length), generator=generator)
        return given | {"decoder_input_ids": codes, "labels": codes.transpose(1, 2)}
    spectrograms = torch.randn(rows, FRAMES_OF_A_TOKEN * length, speaking.num_mel_bins, generator=generator)
    if "spectrogram_labels" not in names:
        return given | {"labels": spectrograms}
    voice = torch.randn(2, rows, length, 1, generator=generator)
    return given | {
        "spectrogram_labels": spectrograms,
        "duration_labels": torch.full((rows, length), FRAMES_OF_A_TOKEN),
        "pitch_labels": voice[0],
        "energy_labels": voice[1],
    }

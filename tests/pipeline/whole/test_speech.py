"""Whisper: the decoder's layers receive the encoder's output from an earlier stage."""

import copy

import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

from tests.support.in_process import InProcessPipeline
from tests.support.training_distance import distance


def whisper() -> WhisperForConditionalGeneration:
    config = WhisperConfig(
        vocab_size=64, num_mel_bins=16, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_source_positions=20,
        max_target_positions=20, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
        use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return WhisperForConditionalGeneration(config)


def test_whisper_is_cut_and_exact() -> None:
    model = whisper()
    whole = copy.deepcopy(model)
    pipeline = InProcessPipeline(model, 2)
    for length in (8, 5):
        batch = {"input_features": torch.randn(4, 16, 40), "labels": torch.randint(4, 64, (4, length))}
        # Every decoder layer uses the encoder's output. Its gradient is summed stage by stage.
        assert distance(pipeline, model, whole, batch, 2) < 1e-6

"""Encoders and decoders of ``torch.nn`` with masks: exact in training, in evaluation, and without gradients."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nxdpp.pipeline.microbatches.rows import split_inputs
from tests.support.exact import assert_exact
from tests.support.in_process import InProcessPipeline

WORDS = torch.arange(24).reshape(4, 6) % 11
PADDING = torch.arange(6) >= torch.tensor([6, 4, 3, 5])[:, None]
ENCODER, DECODER = "TransformerEncoderLayer", "TransformerDecoderLayer"


class WordModel(nn.Module):
    """The language model of PyTorch's tutorial; ``mask`` names the way in which it masks."""

    causal: Tensor

    def __init__(self, mask: str = "made", batch_first: bool = True, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mask, self.batch_first = mask, batch_first
        self.embedding = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 4, **options)
        self.linear = nn.Linear(8, 11)
        self.register_buffer("causal", torch.triu(torch.ones(9, 9), 1).bool())

    def forward(self, words: Tensor, padding: Tensor | None = None) -> Tensor:
        hidden = self.embedding(words) * math.sqrt(8)
        length = words.size(1)
        hidden = hidden if self.batch_first else hidden.transpose(0, 1)
        if self.mask == "none":
            hidden = self.encoder(hidden, src_key_padding_mask=padding)
        elif self.mask == "buffer":
            hidden = self.encoder(hidden, self.causal[:length, :length], padding)
        else:
            mask = nn.Transformer.generate_square_subsequent_mask(length).to(words.device)
            hidden = self.encoder(hidden, mask, padding, is_causal=True if self.mask == "hint" else None)
        hidden = hidden if self.batch_first else hidden.transpose(0, 1)
        return F.cross_entropy(self.linear(hidden).flatten(0, 1), words.flatten())


class Translator(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.batch_first = batch_first
        self.embedding = nn.Embedding(11, 8)
        self.transformer = nn.Transformer(8, 2, 2, 2, 16, 0.0, batch_first=batch_first)
        self.linear = nn.Linear(8, 11)

    def forward(self, words: Tensor, padding: Tensor | None = None) -> Tensor:
        hidden = self.embedding(words)
        hidden = hidden if self.batch_first else hidden.transpose(0, 1)
        mask = self.transformer.generate_square_subsequent_mask(words.size(1))
        given = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding}
        hidden = self.transformer(hidden, hidden.flip(-1), tgt_mask=mask, **given)
        hidden = hidden if self.batch_first else hidden.transpose(0, 1)
        return F.cross_entropy(self.linear(hidden).flatten(0, 1), words.flatten())


@pytest.mark.parametrize(
    ("model", "padded"),
    [
        (WordModel(batch_first=False), True),
        (WordModel("buffer"), True),
        (WordModel("none"), False),
        (Translator(batch_first=True), True),
    ],
)
def test_masks_are_exact(model: nn.Module, padded: bool) -> None:
    inputs = {"words": WORDS, "padding": PADDING} if padded else {"words": WORDS}
    pipeline = assert_exact(model, inputs)
    is_translator = isinstance(model, Translator)
    assert {type(model.get_submodule(layer)).__name__ for layer in pipeline.partition.layers} == (
        {ENCODER, DECODER} if is_translator else {ENCODER}
    )
    whole = copy.deepcopy(model)
    parts = split_inputs(inputs, 2)
    pipeline = InProcessPipeline(model, 2, parts[0])
    with torch.no_grad():
        losses = pipeline.train(inputs, 2, backward=False)
        assert torch.equal(torch.stack(losses), torch.stack([whole(**part) for part in parts]))


def test_padding_that_is_not_on_the_right_is_not_packed() -> None:
    model = WordModel("none").eval()
    inputs = {"words": WORDS, "padding": PADDING.flip(1)}
    parts = split_inputs(inputs, 2)
    pipeline = InProcessPipeline(model, 2, parts[0])
    with torch.no_grad():
        losses = pipeline.train(inputs, 2, backward=False)
        assert torch.equal(torch.stack(losses), torch.stack([model(**part) for part in parts]))

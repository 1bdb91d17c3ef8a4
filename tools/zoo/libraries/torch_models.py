"""PyTorch itself, and small models that are written in many places."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tools.zoo.libraries.case import Batch, Case, tokens

WIDTH, VOCABULARY = 32, 64


class TutorialLanguageModel(nn.Module):
    """PyTorch's tutorial language model: an encoder with a causal mask."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions: Tensor
        positions = torch.arange(32).unsqueeze(1) * torch.exp(torch.arange(0, WIDTH, 2) * (-math.log(1e4) / WIDTH))
        self.register_buffer("positions", torch.stack([positions.sin(), positions.cos()], -1).flatten(1))
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 64, dropout=0.0, batch_first=True, **settings)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.decoder = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) * math.sqrt(WIDTH) + self.positions[: ids.size(1)]
        mask = nn.Transformer.generate_square_subsequent_mask(ids.size(1))
        logits = self.decoder(self.encoder(x, mask, is_causal=True))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class PaddedEncoder(nn.Module):
    """A classifier of padded rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        padded = ids < 8
        x = self.encoder(self.embedding(ids), src_key_padding_mask=padded)
        return F.cross_entropy(self.head(x.masked_fill(padded[..., None], 0).mean(1)), y)


class Translator(nn.Module):
    """``nn.Transformer`` with a causal mask of the target."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 2, 2, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        mask = self.transformer.generate_square_subsequent_mask(target.size(1) - 1)
        x = self.transformer(self.source(ids), self.target(target[:, :-1]), tgt_mask=mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), target[:, 1:].flatten())


class Block(nn.Module):
    """nanoGPT's block."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.ln_1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        y = self.mlp(self.ln_2(x))
        return torch.add(x, y)


class NanoGPT(nn.Module):
    """nanoGPT: a dictionary of modules, tied embeddings, an assertion on the length."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer: Any = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(32, WIDTH),
                "h": nn.ModuleList(Block() for _ in range(4)),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        _, t = ids.size()
        assert t <= 32, f"cannot forward a sequence of length {t}"
        positions = torch.arange(0, t, dtype=torch.long, device=ids.device)
        x = self.transformer["wte"](ids) + self.transformer["wpe"](positions)
        for block in self.transformer["h"]:
            x = block(x)
        logits = self.lm_head(self.transformer["ln_f"](x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class WithLossOnly(nn.Module):
    """Returns the loss of nanoGPT alone."""

    def __init__(self) -> None:
        super().__init__()
        self.model = NanoGPT()

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.model(ids, targets)[1]
        return loss


def _pairs(generator: torch.Generator, rows: int) -> Batch:
    draw = [torch.randint(VOCABULARY, (rows, length), generator=generator) for length in (16, 12)]
    return {"ids": draw[0], "target": draw[1]}


def _classes(generator: torch.Generator, rows: int) -> Batch:
    ids = torch.randint(VOCABULARY, (rows, 16), generator=generator)
    return {"ids": ids, "y": torch.randint(2, (rows,), generator=generator)}


def _next(generator: torch.Generator, rows: int) -> Batch:
    ids = torch.randint(VOCABULARY, (rows, 17), generator=generator)
    return {"ids": ids[:, :-1].clone(), "targets": ids[:, 1:].clone()}


_ENCODER = "TransformerEncoderLayer"
CASES = {
    "tutorial language model": Case(TutorialLanguageModel, tokens(), _ENCODER),
    "nn.TransformerEncoder, norm_first": Case(lambda: TutorialLanguageModel(norm_first=True), tokens(), _ENCODER),
    "nn.TransformerEncoder, padding mask": Case(PaddedEncoder, _classes, _ENCODER),
    "nn.Transformer": Case(Translator, _pairs, [_ENCODER, "TransformerDecoderLayer"]),
    "nanoGPT": Case(WithLossOnly, _next, "Block"),
}

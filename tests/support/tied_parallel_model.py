"""A tied language model with copied key-value heads and a padded vocabulary, in parallel and in one process."""

import torch
from torch import nn
from torch.nn import functional

from nxdpp.ranks import parallel_state
from nxdpp.tensor.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from nxdpp.tensor.loss_functions import parallel_cross_entropy
from nxdpp.tensor.modules.qkv_linear import GQAQKVColumnParallelLinear

HIDDEN, HEADS, HEAD, VOCABULARY = 16, 4, 4, 11


class Whole(nn.Module):
    """The three products of an attention with one key-value head."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(HIDDEN, HEADS * HEAD), nn.Linear(HIDDEN, HEAD), nn.Linear(HIDDEN, HEAD)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q(x), self.k(x), self.v(x)


class TiedLayer(nn.Module):
    """Grouped-query attention; hidden states (B, S, H)."""

    def __init__(self, parallel: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        if parallel:
            copies = parallel_state.get_tensor_model_parallel_size()
            sizes = [HEADS * HEAD, HEAD]
            self.qkv: nn.Module = GQAQKVColumnParallelLinear(
                HIDDEN, sizes, gather_output=False, kv_size_multiplier=copies
            )
            self.out: nn.Module = RowParallelLinear(HEADS * HEAD, HIDDEN, input_is_parallel=True)
        else:
            self.qkv, self.out = Whole(), nn.Linear(HEADS * HEAD, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in self.qkv(self.norm(x)))
        context = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)
        y: torch.Tensor = x + self.out(context)
        return y


class TiedModel(nn.Module):
    """Embedding, layers, norm, and a head with the embedding's weight; the loss of each id."""

    def __init__(self, parallel: bool) -> None:
        super().__init__()
        self.parallel = parallel
        if parallel:
            self.embed: nn.Module = ParallelEmbedding(VOCABULARY, HIDDEN)
            self.head: nn.Module = ColumnParallelLinear(HIDDEN, VOCABULARY, bias=False, gather_output=False, pad=True)
        else:
            self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.layers = nn.ModuleList(TiedLayer(parallel) for _ in range(4))
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        if self.parallel:
            return parallel_cross_entropy(logits, ids, vocabulary_size=VOCABULARY).mean()
        return functional.cross_entropy(logits.flatten(0, 1), ids.flatten())

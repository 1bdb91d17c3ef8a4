"""A language model of tensor-parallel layers, and the same model of torch's layers."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from nxdpp.tensor.layer_norm import LayerNorm
from nxdpp.tensor.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from nxdpp.tensor.loss_functions import parallel_cross_entropy

HIDDEN, INNER, HEADS = 8, 16, 4


class ParallelLayer(nn.Module):
    """Attention and two linear layers, on this rank's heads and features; hidden states (B, S, H)."""

    def __init__(self, sequence: bool) -> None:
        super().__init__()
        split: dict[str, Any] = {"sequence_parallel_enabled": sequence, "sequence_dimension": 1}
        self.norm = LayerNorm(HIDDEN, sequence_parallel_enabled=sequence)
        self.qkv = ColumnParallelLinear(HIDDEN, 3 * HIDDEN, gather_output=False, stride=3, **split)
        self.out = RowParallelLinear(HIDDEN, HIDDEN, input_is_parallel=True, **split)
        self.up = ColumnParallelLinear(HIDDEN, INNER, gather_output=False, bias=False, **split)
        self.down = RowParallelLinear(INNER, HIDDEN, input_is_parallel=True, **split)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out(attention(self.qkv(self.norm(x)), HEADS // self.qkv.tensor_parallel_size))
        y: torch.Tensor = x + self.down(functional.silu(self.up(x)))
        return y


class Layer(nn.Module):
    """The same layer in one process."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, INNER, bias=False), nn.Linear(INNER, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out(attention(self.qkv(self.norm(x)), HEADS))
        y: torch.Tensor = x + self.down(functional.silu(self.up(x)))
        return y


def attention(qkv: torch.Tensor, heads: int) -> torch.Tensor:
    """Return the context (B, S, D) of fused queries, keys and values (B, S, 3 * D)."""
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class ParallelModel(nn.Module):
    """Embedding, layers, norm and head over the tensor-parallel ranks."""

    def __init__(self, layers: int, vocabulary: int, sequence: bool) -> None:
        super().__init__()
        self.embed = ParallelEmbedding(vocabulary, HIDDEN, sequence_parallel_enabled=sequence, sequence_dimension=1)
        self.layers = nn.ModuleList(ParallelLayer(sequence) for _ in range(layers))
        self.norm = LayerNorm(HIDDEN, sequence_parallel_enabled=sequence)
        self.head = ColumnParallelLinear(
            HIDDEN,
            vocabulary,
            bias=False,
            gather_output=False,
            sequence_parallel_enabled=sequence,
            sequence_dimension=1,
        )

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        loss: torch.Tensor = parallel_cross_entropy(self.head(self.norm(x)), labels).mean()
        return loss


class Model(nn.Module):
    """The same model in one process."""

    def __init__(self, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, vocabulary, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, -2), labels.flatten())

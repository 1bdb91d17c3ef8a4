"""Batches whose microbatches have different numbers of labels, and models that count them in other ways."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.support.models import VOCABULARY

LENGTH = 32
UNEVEN = (31, 20, 10, 4)
"""Labels kept in each row of each microbatch."""
ONE_EMPTY = (31, 0, 10, 4)


def uneven_batch(kept: tuple[int, ...], rows: int = 2, seed: int = 0) -> dict[str, Tensor]:
    """Tokens and labels, (rows x microbatches, 32). Rows of microbatch ``i`` have ``kept[i]`` labels after a first."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (len(kept) * rows, LENGTH), generator=generator)
    labels = ids.clone()
    for number, count in enumerate(kept):
        labels[number * rows : (number + 1) * rows, 1 + count :] = -100
    return {"input_ids": ids, "labels": labels}


def count_labels(inputs: dict[str, Any]) -> Tensor:
    """Number of labels of a microbatch of ``MeanModel``."""
    return torch.sum(inputs["labels"][:, 1:] != -100)


class MeanLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = x + self.linear(x).tanh()
        return changed


class MeanModel(nn.Module):
    """A language model whose loss is the mean over its labels; 0 / 0 without any, in the gradients too."""

    def __init__(self, layers: int, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(MeanLayer(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)[:, :-1].reshape(-1, VOCABULARY)
        targets = labels[:, 1:].reshape(-1)
        counted = targets != -100
        # Not cross_entropy, whose backward leaves ignored labels out: 0 / 0 would not reach the parameters.
        each = -logits.log_softmax(-1).gather(1, targets.clamp(min=0).unsqueeze(1)).squeeze(1)
        return {"loss": (each * counted).sum() / counted.sum(), "logits": logits}


def mean_model(layers: int) -> MeanModel:
    """The model, with the same weights in every process."""
    torch.manual_seed(1)
    return MeanModel(layers)

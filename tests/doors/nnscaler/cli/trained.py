"""Models and data that the arguments of the trainer's tests name."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, Sampler

from nxdpp.nnscaler.cli.trainer import Trainer


class MLP(nn.Module):
    """Linear layers and a loss of a sample in a dict."""

    def __init__(self, dim: int, nlayers: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, dim), nn.Dropout(dropout), nn.Tanh()) for _ in range(nlayers)
        )

    def forward(self, data: dict[str, torch.Tensor]) -> torch.Tensor:
        x = data["data"]
        for layer in self.layers:
            x = layer(x)
        return (x - data["target"]).square().mean()


class SimpleDataset(Dataset[dict[str, torch.Tensor]]):
    """Random pairs."""

    def __init__(self, dim: int, size: int) -> None:
        self.pairs = torch.randn(size, 2, dim, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"data": self.pairs[index, 0], "target": self.pairs[index, 1]}


class Drawn(Sampler[int]):
    """Orders from the global generator."""

    def __init__(self, dataset: SimpleDataset, num_replicas: int, rank: int) -> None:
        self.all, self.own = len(dataset), len(dataset) // num_replicas

    def __len__(self) -> int:
        return self.own

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.all)[: self.own].tolist()


class Lines:
    """A logger that keeps what it is given."""

    lines: list[tuple[Any, ...]]

    def __init__(self, name: str) -> None:
        assert name == "1"
        self.lines = []

    def setup(self, config: dict[str, Any]) -> None:
        self.lines.append(("setup", config["max_epochs"]))

    def log_metrics(self, metrics: dict[str, float], step: int, *, tag: str | None = None) -> None:
        self.lines.append((tag, step, metrics["train_loss" if tag == "train" else "val_loss"], metrics.get("gnorm")))

    def finalize(self) -> None:
        self.lines.append(("finalize",))


def count_steps(trainer: Trainer, epoch: int, idx: int, metrics: dict[str, float], outputs: Any) -> None:
    """A hook: note the steps of each epoch in the trainer."""
    seen = vars(trainer).setdefault("seen", [])
    seen.append((epoch, idx, outputs.num_batches))

"""A small training in one process or in replicas, and comparison of all of its state."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR

from nxdpp.doors.nxd.checkpoint import load_checkpoint, save_checkpoint


class Training:
    """A model of two layers, whose values are those of a step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        self.optimizer = AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = StepLR(self.optimizer, 1, 0.5)

    def step(self) -> None:
        self.model(torch.ones(3, 4)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def save(self, path: Path | str, tag: str, **options: Any) -> None:
        content = {"tag": tag}
        save_checkpoint(path, tag, self.model, self.optimizer, self.scheduler, content, **options)

    def load(self, path: Path | str, tag: str | None = None, strict: bool = True) -> Any:
        return load_checkpoint(path, tag, self.model, self.optimizer, self.scheduler, strict=strict)

    def state(self) -> dict[str, Any]:
        state = self.optimizer.state_dict()
        tensors = {f"{key}.{name}": value for key, of in state["state"].items() for name, value in of.items()}
        rest = {"groups": state["param_groups"], "scheduler": self.scheduler.state_dict()}
        return copy.deepcopy({**self.model.state_dict(), **tensors, **rest})


def is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[key], other[key]) if isinstance(one[key], torch.Tensor) else one[key] == other[key]
        for key in one
    )

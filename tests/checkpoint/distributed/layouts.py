"""Trainings in a layout of ranks, that load a checkpoint of another layout and save one of their own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from nxdpp import NxDPPModel, fully_shard, tensor_parallelize
from nxdpp.checkpoint.distributed.document import Document, parsed_document, read_document, tensors_of
from nxdpp.checkpoint.distributed.reads import read_tensors
from nxdpp.checkpoint.distributed.rectangles import whole
from nxdpp.doors.nxd.checkpoint import load_checkpoint, save_checkpoint
from nxdpp.gradients.optimizer.fp32_adamw import AdamW_FP32OptimParams
from nxdpp.gradients.optimizer.zero1 import Zero1Optimizer


@dataclass(frozen=True)
class Layout:
    """Sizes of a job and its pipeline; the data-parallel size is the rest of the ranks.

    ``shards`` is ``data_parallel_shard_size``; 0 leaves parameters whole.
    """

    pipeline: int = 1
    tensor: int = 1
    zero1: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)
    shards: int = 0

    def __str__(self) -> str:
        zero1 = " zero1" if self.zero1 else f" shards{self.shards}" if self.shards else ""
        return f"pp{self.pipeline} tp{self.tensor}{zero1} {' '.join(map(str, self.arguments.values()))}".strip()


def learning_rates(optimizer: Optimizer) -> LambdaLR:
    """A scheduler whose rates depend on the number of steps."""
    return LambdaLR(optimizer, lambda step: 1 / (1 + step))


class Training:
    """A model of ``make`` with an optimizer of two groups and a scheduler, in a layout; half values have masters."""

    def __init__(self, make: Callable[[], nn.Module], layout: Layout) -> None:
        module = make()
        if layout.tensor > 1:
            tensor_parallelize(module)
        options = {"num_microbatches": 2, "use_zero1_optimizer": layout.zero1, **layout.arguments}
        self.model = NxDPPModel(module, **options)
        self.model.move_model_to_device()
        if layout.shards:
            fully_shard(self.model)
        named = list(self.model.local_named_parameters())
        matrices = [parameter for _, parameter in named if parameter.dim() > 1]
        vectors = [parameter for _, parameter in named if parameter.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        if layout.zero1:
            self.optimizer: Optimizer = Zero1Optimizer(groups, AdamW, grad_clipping=False, lr=1e-2)
        else:
            is_half = any(parameter.dtype == torch.bfloat16 for _, parameter in named)
            self.optimizer = (AdamW_FP32OptimParams if is_half else AdamW)(groups, lr=1e-2)
        self.scheduler = learning_rates(self.optimizer)

    def step(self, batch: Mapping[str, Any]) -> float | None:
        """Train one step; return the loss where the model returns one."""
        loss = self.model.run_train(**batch)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return loss.item() if isinstance(loss, torch.Tensor) else None


def train_and_save(make: Callable[[], nn.Module], batches: list[dict[str, Any]], layout: Layout, path: Path) -> None:
    """Train on ``batches``, and save under the tag ``layout``; model parallelism is initialised."""
    training = Training(make, layout)
    for batch in batches:
        training.step(batch)
    save_checkpoint(path, str(layout), training.model, training.optimizer, training.scheduler, {"steps": len(batches)})


def copy_through(make: Callable[[], nn.Module], layout: Layout, path: Path, source: str) -> None:
    """Load the checkpoint ``source`` in ``layout``, and save what was loaded; model parallelism is initialised."""
    training = Training(make, layout)
    content = load_checkpoint(path, source, training.model, training.optimizer, training.scheduler)
    save_checkpoint(path, str(layout), training.model, training.optimizer, training.scheduler, content)


def tensors_in(folder: Path) -> tuple[Document, dict[str, torch.Tensor]]:
    """The document of a checkpoint, and its tensors but the states of generators."""
    document = parsed_document(folder, read_document(folder))
    shapes = tensors_of(document.metadata)
    tensors = {
        name: torch.empty(saved.size, dtype=saved.properties.dtype)
        for name, saved in shapes.items()
        if not name.startswith("random.")
    }
    read_tensors(folder, document.metadata, {name: whole(tensor) for name, tensor in tensors.items()})
    return document, tensors

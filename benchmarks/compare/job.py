"""What all contenders of a case run: a model, how to cut it by hand, a batch, and what one process makes of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Job:
    """A model and a batch.

    Attributes:
        make_model: the whole model, the same each time.
        layer_class: after whose instances can be cut.
        cut: ``(model, stage, stages)`` to a module that is the stage of a hand-made pipeline: the first takes a
            microbatch of ``first_input``, others hidden states, and the last returns what ``loss`` takes. Its
            parameters have their names in the whole model.
        loss: ``(output, target)`` of a microbatch to its loss.
        inputs: what the whole model is called with; it returns the loss.
        first_input: of those, the one that the first stage takes.
        target: split along dimension 0 as the inputs are.
        hidden: the size of the hidden states of one microbatch between two stages, float32.
        microbatches: into how many a batch is split.
    """

    make_model: Callable[[], nn.Module]
    layer_class: type[nn.Module]
    cut: Callable[[nn.Module, int, int], nn.Module]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    inputs: dict[str, torch.Tensor]
    first_input: torch.Tensor
    target: torch.Tensor
    hidden: tuple[int, ...]
    microbatches: int

    def reference(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The mean loss and the gradients of one process that accumulates the microbatches."""
        model = self.make_model()
        loss = run_one_process(model, self)
        return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def run_one_process(model: nn.Module, job: Job) -> torch.Tensor:
    """Forward and backward of all microbatches, one after the other; the mean loss."""
    parts: dict[str, Any] = {name: value.chunk(job.microbatches) for name, value in job.inputs.items()}
    losses = []
    for microbatch in range(job.microbatches):
        output = model(**{name: part[microbatch] for name, part in parts.items()})
        loss = (output if isinstance(output, torch.Tensor) else output.loss) / job.microbatches
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()

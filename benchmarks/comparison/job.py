"""A job: the model, the hand-made cut and the batch that all contenders of a case run."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Job:
    """A model and a batch.

    Attributes:
        make_model: returns the whole model, with equal parameters each time.
        layer_class: class of the layers; a cut may follow each.
        cut: ``(model, stage, stages)`` to the module of one stage of a hand-made pipeline. The first stage takes a
            microbatch of ``first_input``, others take hidden states, and the last returns the output for ``loss``.
            Parameters keep their names in the whole model.
        loss: ``(output, target)`` of a microbatch to its loss.
        inputs: arguments of the whole model, which returns the loss.
        first_input: the argument that the first stage takes.
        target: split along dimension 0 like the inputs.
        hidden: shape of the hidden states of one microbatch between two stages, float32.
        microbatches: number of microbatches.
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
        loss = self.run_in_one_process(model)
        return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def run_in_one_process(self, model: nn.Module) -> torch.Tensor:
        """Run forward and backward of all microbatches in turn; return the mean loss."""
        parts = {name: value.chunk(self.microbatches) for name, value in self.inputs.items()}
        losses = []
        for microbatch in range(self.microbatches):
            output = model(**{name: part[microbatch] for name, part in parts.items()})
            loss = (output if isinstance(output, torch.Tensor) else output.loss) / self.microbatches
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

"""Whoever runs a step of the same model: this runtime, torch's, or a loop written by hand."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

import torch
from torch import nn

US, PEER, BY_HAND = "nxdpp", "torch", "by hand"


class Contender(ABC):
    """One rank's part of a pipeline.

    Attributes:
        name: who it is.
        family: the schedule, by the name that ``nxdpp.schedules`` gives it.
    """

    def __init__(self, name: str, family: str) -> None:
        self.name = name
        self.family = family

    @abstractmethod
    def step(self) -> torch.Tensor | None:
        """Forward and backward of all microbatches; the mean loss, where the last stage is. Collective."""

    @abstractmethod
    def parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """This rank's parameters under the names that the whole model gives them."""

    def forget_gradients(self) -> None:
        """As if nothing had run."""
        for _, parameter in self.parameters():
            parameter.grad = None


def check_step(contender: Contender, loss: torch.Tensor, gradients: Mapping[str, torch.Tensor]) -> None:
    """Run a step, and raise ``AssertionError`` unless its loss and gradients are those of one process.

    Equal to 1e-5 of the largest element: weight-gradients may be summed in another order.
    """
    contender.forget_gradients()
    own = contender.step()
    who = f"{contender.name} {contender.family}"
    if own is not None:
        _check_close(f"{who}: loss", own, loss)
    for name, parameter in contender.parameters():
        assert parameter.grad is not None, f"{who}: no gradient of {name}"
        _check_close(f"{who}: gradient of {name}", parameter.grad, gradients[name])


def _check_close(what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    scale = expected.abs().max().item()
    assert scale > 0, f"{what} would be equal to anything"
    difference = (found.detach() - expected).abs().max().item()
    assert difference <= 1e-5 * scale, f"{what} differs by {difference}, and its largest element is {scale}"

"""Parameters that several ranks hold: their gradients are summed once a step.

Every owner adds to its copy only what the step contributed to it; what lay in ``.grad`` before, already summed,
is set aside and put back::

    before    rank 0: G         rank 3: G            (equal, from an earlier accumulation)
    step      rank 0: a         rank 3: b
    after     rank 0: G+(a+b)   rank 3: G+(a+b)
"""

from dataclasses import dataclass

import torch
from torch import nn

from nxdpp.pipeline.layout import layout_of
from nxdpp.pipeline.transport import Direction, Transport, Work


@dataclass(frozen=True)
class TiedWeight:
    """A parameter of this rank, by name, of which other ranks hold copies.

    ``ranks`` are all of them, in order; ``number`` means the same weight on each.
    """

    name: str
    ranks: tuple[int, ...]
    number: int


class TiedGradients:
    """The tied weights of one rank, over one step at a time.

    ``set_aside`` comes before the step's first backward, ``add_up`` after its last; both on every rank of the
    pipeline, the latter exchanges gradients.
    """

    def __init__(self, module: nn.Module, weights: list[TiedWeight], rank: int) -> None:
        self._module = module
        self._weights = weights
        self._rank = rank
        self._sends: list[tuple[Work, torch.Tensor]] = []
        self._accumulated: list[torch.Tensor | None] = []

    def set_aside(self) -> None:
        """Take what the gradients hold already out of them."""
        parameters = [self._module.get_parameter(weight.name) for weight in self._weights]
        self._accumulated = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None

    def add_up(self, transport: Transport) -> None:
        """Give every owner the sum of all owners' contributions, summed in the order of the ranks."""
        for weight, earlier in zip(self._weights, self._accumulated, strict=True):
            parameter = self._module.get_parameter(weight.name)
            # A copy that is frozen here may not be elsewhere: every owner takes part.
            total = self._sum(parameter, weight.ranks, transport, weight.number)
            if parameter.requires_grad:
                parameter.grad = total
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
        while self._sends:
            self._sends.pop()[0].wait()
        self._accumulated = []

    def _sum(self, parameter: nn.Parameter, ranks: tuple[int, ...], transport: Transport, tag: int) -> torch.Tensor:
        own = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        (layout,) = layout_of(own).tensors
        own = layout.arrange(own)
        first, *others = ranks
        if self._rank != first:
            self._sends.append(transport.send(own, first, Direction.GRADIENT, tag))
            return transport.post_receive(layout, first, Direction.ACTIVATION, tag)()
        contributions = [transport.post_receive(layout, rank, Direction.GRADIENT, tag) for rank in others]
        for contribution in contributions:
            own = own + contribution()
        self._sends += [transport.send(own, rank, Direction.ACTIVATION, tag) for rank in others]
        return own

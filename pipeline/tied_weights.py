"""Parameters that several stages hold: their gradients are summed once a step.

Every owner adds to its copy only what the step contributed to it; what lay in ``.grad`` before, already summed,
is set aside and put back::

    before    stage 0: G        stage 3: G           (equal, from an earlier accumulation)
    step      stage 0: a        stage 3: b
    after     stage 0: G+(a+b)  stage 3: G+(a+b)
"""

from dataclasses import dataclass

import torch
from torch import nn

from nxdpp.pipeline.layout import layout_of
from nxdpp.pipeline.transport import Direction, Transport


@dataclass(frozen=True)
class TiedWeight:
    """A parameter of this stage, by name, of which other stages hold copies.

    ``stages`` are all of them, in order; ``number`` means the same weight on each.
    """

    name: str
    stages: tuple[int, ...]
    number: int


class TiedGradients:
    """The tied weights of one stage, over one step at a time.

    ``set_aside`` comes before the step's first backward, ``add_up`` after its last; both on every rank of the
    pipeline, the latter exchanges gradients.
    """

    def __init__(self, module: nn.Module, weights: list[TiedWeight], stage: int) -> None:
        self._module = module
        self._weights = weights
        self._stage = stage
        self._accumulated: list[torch.Tensor | None] = []

    def set_aside(self) -> None:
        """Take what the gradients hold already out of them."""
        parameters = [self._module.get_parameter(weight.name) for weight in self._weights]
        self._accumulated = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None

    def add_up(self, transport: Transport) -> None:
        """Give every owner the sum of all owners' contributions, summed in the order of the stages."""
        for weight, earlier in zip(self._weights, self._accumulated, strict=True):
            parameter = self._module.get_parameter(weight.name)
            # A copy that is frozen here may not be elsewhere: every owner takes part.
            total = self._sum(parameter, weight.stages, transport, weight.number)
            if parameter.requires_grad:
                parameter.grad = total
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
        transport.finish_sends()
        self._accumulated = []

    def _sum(self, parameter: nn.Parameter, stages: tuple[int, ...], transport: Transport, tag: int) -> torch.Tensor:
        own = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        (layout,) = layout_of(own).tensors
        own = layout.arrange(own)
        first, *others = stages
        if self._stage != first:
            transport.send(own, first, Direction.GRADIENT, tag)
            return transport.post_receive(layout, first, Direction.ACTIVATION, tag)()
        contributions = [transport.post_receive(layout, stage, Direction.GRADIENT, tag) for stage in others]
        for contribution in contributions:
            own = own + contribution()
        for stage in others:
            transport.send(own, stage, Direction.ACTIVATION, tag)
        return own

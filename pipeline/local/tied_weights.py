"""Parameters that several ranks hold: their gradients are summed once a step.

Every owner adds to its copy only what the step contributed to it; what lay in ``.grad`` before, already summed,
is set aside and put back::

    before    rank 0: G         rank 3: G            (equal, from an earlier accumulation)
    step      rank 0: a         rank 3: b
    after     rank 0: G+(a+b)   rank 3: G+(a+b)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from nxdpp.pipeline.p2p.layout import layout_of
from nxdpp.pipeline.p2p.transport import Direction, Transport, Work


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

    def __init__(self, module: nn.Module, weights: Sequence[TiedWeight], rank: int) -> None:
        self._module = module
        self._weights = list(weights)
        self._parameters = [module.get_parameter(weight.name) for weight in weights]
        self._rank = rank
        self._sends: list[tuple[Work, torch.Tensor]] = []
        self._accumulated: list[torch.Tensor | None] = []

    @property
    def weights(self) -> list[TiedWeight]:
        """The tied weights of this rank, in the order of their numbers, under the names that they have now."""
        return list(self._weights)

    def follow(self) -> None:
        """Find the parameters again after something was replaced.

        A parameter that is still there under another name (``lm_head.base.weight``) is followed; one that is not
        has given its place, and its ties, to what has its name now. Raises ``RuntimeError`` where that is nothing, or
        of another shape.
        """
        now = dict(self._module.named_parameters(remove_duplicate=False))
        names: dict[int, list[str]] = {}
        for name, parameter in now.items():
            names.setdefault(id(parameter), []).append(name)
        for place, (weight, before) in enumerate(zip(self._weights, self._parameters, strict=True)):
            same = names.get(id(before), [weight.name])
            name = weight.name if weight.name in same else same[0]
            if name not in now or now[name].shape != before.shape:
                found = f"replaced by one of {list(now[name].shape)}" if name in now else "taken away"
                raise RuntimeError(
                    f"{weight.name}, of shape {list(before.shape)}, is shared by the pipeline ranks "
                    f"{list(weight.ranks)} and was {found} on rank {self._rank}. Keep the parameter, or put one of the "
                    f"same shape in its place."
                )
            self._weights[place] = replace(weight, name=name)
            self._parameters[place] = now[name]

    def set_aside(self) -> None:
        """Take what the gradients hold already out of them."""
        self._accumulated = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    def add_up(self, transport: Transport) -> None:
        """Give every owner the sum of all owners' contributions, summed in the order of the ranks."""
        for weight, parameter, earlier in zip(self._weights, self._parameters, self._accumulated, strict=True):
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

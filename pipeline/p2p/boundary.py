"""What crosses from one stage to a later one: activations one way, their gradients back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nxdpp.pipeline.p2p.layout import TensorLayout, ValueLayout
from nxdpp.pipeline.stages.split import StagePlan


@dataclass(frozen=True)
class Crossing:
    """One tensor, the ``position``-th of a value, on its way between two stages, in either direction.

    ``number`` tells the tensors between the two stages apart.
    """

    value: str
    position: int
    number: int
    layout: TensorLayout


class Border:
    """The values of ``maker`` that ``user`` takes, and those of which it needs only the metadata.

    What they look like is known once the maker has described them, along with its first microbatch of a signature.
    """

    def __init__(self, maker: int, user: int, values: Sequence[str], described: Sequence[str]) -> None:
        self.maker = maker
        self.user = user
        # Both sides must number alike, and the plan of each lists values in its own order.
        self.values = sorted(values)
        self.described = sorted(described)
        self.layouts: Mapping[str, ValueLayout] | None = None
        self.activations: list[Crossing] = []
        self.gradients: list[Crossing] = []

    def agree(self, layouts: Mapping[str, ValueLayout]) -> None:
        """Take note of the maker's description."""
        self.layouts = layouts
        for name in self.values:
            for position, layout in enumerate(layouts[name].tensors):
                self.activations.append(Crossing(name, position, len(self.activations), layout))
        self.gradients = [crossing for crossing in self.activations if crossing.layout.requires_grad]


def incoming(plan: StagePlan) -> list[Border]:
    """The borders over which values come to a stage, by maker."""
    return [Border(maker, plan.stage, _of(plan.received, maker), _of(plan.stand_ins, maker)) for maker in plan.makers]


def outgoing(plan: StagePlan) -> list[Border]:
    """The borders over which values of a stage leave, by user."""
    return [Border(plan.stage, user, _to(plan.sent, user), _to(plan.described, user)) for user in plan.users]


def _of(makers: Mapping[str, int], maker: int) -> list[str]:
    return [name for name, stage in makers.items() if stage == maker]


def _to(users: Mapping[str, Sequence[int]], user: int) -> list[str]:
    return [name for name, stages in users.items() if user in stages]

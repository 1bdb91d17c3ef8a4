"""The code of one stage for one set of inputs, and what its neighbours have agreed about shapes."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from nxdpp.pipeline.fingerprint import Fingerprint
from nxdpp.pipeline.layout import TensorLayout, ValueLayout
from nxdpp.pipeline.split import StagePlan
from nxdpp.schedules.actions import Action
from nxdpp.schedules.lowering import StageEdge

_AGREEMENTS_KEPT = 1024


@dataclass(frozen=True)
class Crossing:
    """One tensor, the ``position``-th of a value, between this stage and ``peer``, in either direction.

    ``number`` tells the tensors between two stages apart.
    """

    value: str
    position: int
    peer: int
    number: int
    layout: TensorLayout


@dataclass
class Agreement:
    """What crosses the borders of a stage for inputs of one signature; the same on both sides of each.

    ``digest`` tells graph and signature apart from others.
    """

    digest: int = 0

    received: dict[str, ValueLayout] = field(default_factory=dict)
    sent: dict[str, ValueLayout] = field(default_factory=dict)
    stand_ins: dict[str, Any] = field(default_factory=dict)
    arriving: list[Crossing] = field(default_factory=list)
    leaving: list[Crossing] = field(default_factory=list)

    def note_received(self, plan: StagePlan) -> None:
        """Number what arrives, once all of ``received`` is known."""
        for maker in plan.makers:
            names = [name for name, stage in plan.received.items() if stage == maker]
            self.arriving += _numbered(names, maker, self.received)

    def note_sent(self, plan: StagePlan) -> None:
        """Number what leaves, once all of ``sent`` is known."""
        for user in plan.users:
            names = [name for name, stages in plan.sent.items() if user in stages]
            self.leaving += _numbered(names, user, self.sent)


@dataclass
class StageProgram:
    """A stage ready to run: ``module`` maps inputs, received values and stand-ins to ``plan.made``.

    ``graph`` is the fingerprint of the graph of all stages, with all that must be alike on their ranks.
    ``edges`` are the pairs of stages of the whole pipeline between which values travel; ``actions`` what this
    rank does to train (``True``) and to evaluate (``False``).
    """

    plan: StagePlan
    module: fx.GraphModule
    edges: frozenset[StageEdge]
    graph: Fingerprint
    actions: dict[bool, list[Action]] = field(default_factory=dict)
    agreements: dict[Any, Agreement] = field(default_factory=dict)

    def remember(self, signature: Any, agreement: Agreement) -> None:
        """Keep ``agreement``, and forget the oldest ones: all ranks see the same signatures, and forget alike."""
        self.agreements[signature] = agreement
        while len(self.agreements) > _AGREEMENTS_KEPT:
            del self.agreements[next(iter(self.agreements))]

    def arguments(self, inputs: dict[str, Any], received: dict[str, Any], stand_ins: dict[str, Any]) -> list[Any]:
        """The arguments of ``module``."""
        return [
            *(inputs[name] for name in self.plan.inputs),
            *(received[name] for name in self.plan.received),
            *(stand_ins[name] for name in self.plan.stand_ins),
        ]


def _numbered(names: list[str], peer: int, layouts: dict[str, ValueLayout]) -> Iterator[Crossing]:
    number = 0
    # Both sides must number alike, and the plan of each lists values in its own order.
    for name in sorted(names):
        for position, layout in enumerate(layouts[name].tensors):
            yield Crossing(name, position, peer, number, layout)
            number += 1

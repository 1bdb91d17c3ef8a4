"""The code of a rank's stages for one set of inputs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import fx

from nxdpp.pipeline.agreement.fingerprint import Fingerprint
from nxdpp.pipeline.stages.split import StagePlan
from nxdpp.schedules.lowering.lowering import StagePair

if TYPE_CHECKING:
    from nxdpp.pipeline.runtime.engine import Engine

_ENGINES_KEPT = 256


@dataclass(frozen=True)
class StageProgram:
    """A stage ready to run: ``module`` maps inputs, received values and stand-ins to ``plan.made``."""

    plan: StagePlan
    module: fx.GraphModule

    def arguments(self, inputs: dict[str, Any], received: dict[str, Any], stand_ins: dict[str, Any]) -> list[Any]:
        """The arguments of ``module``."""
        return [
            *(inputs[name] for name in self.plan.inputs),
            *(received[name] for name in self.plan.received),
            *(stand_ins[name] for name in self.plan.stand_ins),
        ]


@dataclass
class RankProgram:
    """The stages of a rank, by number.

    ``edges`` are the pairs of stages of the whole pipeline between which values travel. ``graph`` is the fingerprint
    of the graph of all stages, with all that must be alike on their ranks. ``results`` are the values that the last
    stage ends with. ``engines`` are those for the signatures seen so far, each with its digest.
    """

    stages: Mapping[int, StageProgram]
    edges: frozenset[StagePair]
    graph: Fingerprint
    results: list[str]
    engines: dict[Any, tuple["Engine", int]] = field(default_factory=dict)

    def remember(self, signature: Any, engine: "Engine", digest: int) -> None:
        """Keep ``engine``, and forget the oldest ones: all ranks see the same signatures, and forget alike."""
        self.engines[signature] = engine, digest
        while len(self.engines) > _ENGINES_KEPT:
            del self.engines[next(iter(self.engines))]

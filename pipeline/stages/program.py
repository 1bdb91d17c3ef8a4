"""The code of a rank's stages for one set of inputs."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from nxdpp.pipeline.agreement.fingerprint import Fingerprint
from nxdpp.pipeline.stages.split import StagePlan
from nxdpp.schedules.lowering.lowering import StagePair


@dataclass(frozen=True)
class StageProgram:
    """A stage ready to run: ``module`` maps inputs, received values and metadata placeholders to ``plan.made``."""

    plan: StagePlan
    module: fx.GraphModule


@dataclass(eq=False)
class RankProgram:
    """The stages of a rank, by number.

    ``edges`` are the pairs of stages of the whole pipeline between which values travel. ``graph`` is the fingerprint
    of the graph of all stages, with all that must be alike on their ranks. ``results`` are the values that the last
    stage ends with.
    """

    stages: Mapping[int, StageProgram]
    edges: frozenset[StagePair]
    graph: Fingerprint
    results: list[str]

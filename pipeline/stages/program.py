"""Program of a rank: the modules of its stages for one spec of inputs."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from nxdpp.pipeline.agreement.fingerprint import Fingerprint
from nxdpp.pipeline.stages.split import StagePlan


@dataclass(frozen=True)
class StageProgram:
    """One stage: ``module`` maps inputs, received values and metadata placeholders to ``plan.made``."""

    plan: StagePlan
    module: fx.GraphModule


@dataclass(eq=False)
class RankProgram:
    """The stages of one rank.

    Attributes:
        stages: the local stages, by number.
        edges: pairs of source and destination stage, of the whole pipeline.
        graph: fingerprint of the graph of all stages, and of all settings that must be equal on their ranks.
        results: values that the last stage ends with.
    """

    stages: Mapping[int, StageProgram]
    edges: frozenset[tuple[int, int]]
    graph: Fingerprint
    results: list[str]

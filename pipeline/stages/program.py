"""Program of a rank: the modules of its stages for one spec of inputs."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from nxdpp.pipeline.agreement.fingerprint import Fingerprint
from nxdpp.pipeline.stages.split import StagePlan


@dataclass(eq=False)
class StageProgram:
    """One stage.

    Attributes:
        plan: the plan of the stage.
        module: maps inputs, received values and metadata placeholders to ``plan.made``.
        first_run: the same module, which verifies that its layers change nothing that the spine reads; ``None`` after
            the first run, and where the spine has no code of the user.
    """

    plan: StagePlan
    module: fx.GraphModule
    first_run: fx.GraphModule | None = None


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

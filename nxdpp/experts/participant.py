"""The participant of a step that layers of experts over ranks bring: ``Experts``."""

from collections.abc import Mapping, Sequence
from typing import Any

from nxdpp.experts import shared
from nxdpp.experts.routing import StepRouting
from nxdpp.gradients.replica_gradients import ReplicaGradients
from nxdpp.pipeline.local.changes import Change
from nxdpp.pipeline.local.part import Part
from nxdpp.pipeline.step import Participant, Step
from nxdpp.ranks.faults import failure_watch
from nxdpp.schedules.lowering.additions import TOKENS
from nxdpp.tracing.modules import listings


class Experts(Participant):
    """Layers whose experts other data-parallel ranks have too: all of these run the same actions in the same order."""

    def __init__(self, part: Part, replicas: ReplicaGradients, facts: Sequence[str]) -> None:
        self._part, self._replicas, self._facts = part, replicas, facts
        self.additions = TOKENS
        self._routing, self._watch = StepRouting(), part.changes.watch(Change.MODULE)

    @property
    def routing(self) -> StepRouting:
        """Routing of the layers of experts, which are followed through changes of modules."""
        if self._watch.has_moved:
            named = listings.named_modules(self._part.module)
            self._routing.follow({m: n for n, m in named if getattr(type(m), "participant_of_steps", None) is Experts})
            self._watch.settle()
        return self._routing

    def before(self, step: Step) -> None:
        """Check that choices that are given again are those of such a step."""
        self.routing.check(len(step.loss.microbatches))

    def after(self, step: Step) -> None:
        """Verify that all replicas begin this step: their layers wait for each other's tokens."""
        self.routing.begin(step.engine.microbatches, step.train)
        kind = "training step" if step.train else "evaluation"
        microbatches = f"microbatches: {len(step.loss.microbatches)}"
        with failure_watch.reported():
            self._replicas.exchanges.begin(f"{kind} of experts over ranks", [microbatches, *self._facts])

    def finish(self, step: Step) -> None:
        """Let shared experts run ahead that can."""
        shared.settle()

    def told(self) -> Mapping[str, Any]:
        """Return how many tokens came to the experts of this rank."""
        return self.routing.balance()

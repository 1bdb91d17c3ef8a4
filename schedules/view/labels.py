"""Labels of actions in drawings."""

from collections.abc import Sequence

from nxdpp.schedules.actions import Action, ActionKind
from nxdpp.schedules.simulate import Span

NAMES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT_GRADIENT: "input-gradient",
    ActionKind.WEIGHT_GRADIENT: "weight-gradient",
}


class RankLabels:
    """Labels of the actions of one rank."""

    def __init__(self, spans: Sequence[Span]) -> None:
        stages = {span.action.stage for span in spans}
        self._first = min(stages) if len(stages) > 1 else None

    def is_first_chunk(self, action: Action) -> bool:
        """Return whether the action is of the first of several stages of the rank."""
        return action.stage == self._first

    def label(self, action: Action) -> str:
        """Return the letter of the kind, small for the first of several stages, and the microbatch."""
        letter = action.kind.value
        return f"{letter.lower() if self.is_first_chunk(action) else letter}{action.microbatch}"


def kinds_in(ranks: Sequence[Sequence[Span]]) -> list[ActionKind]:
    """Return the kinds of the actions, in the order of ``NAMES``."""
    found = {span.action.kind for spans in ranks for span in spans}
    return [kind for kind in NAMES if kind in found]


def has_chunks(ranks: Sequence[Sequence[Span]]) -> bool:
    """Return whether a rank has several stages."""
    return any(len({span.action.stage for span in spans}) > 1 for spans in ranks)
